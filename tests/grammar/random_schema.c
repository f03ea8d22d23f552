#include "tests/grammar/random_schema.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"

/* ---- Schemas ---- */

static uint64_t draw(uint64_t *random, uint64_t n) {
    *random = cpa_mix64(*random + CPA_GOLDEN);
    return (*random >> 8) % n;
}

static json_t *make(uint64_t *random, int depth);

static json_t *make_value(uint64_t *random) {
    switch (draw(random, 5)) {
        case 0: return json_null();
        case 1: return json_integer((json_int_t)draw(random, 30) - 10);
        case 2: return json_string(draw(random, 2) ? "a\"b" : "\xc3\xa9");
        case 3: return json_pack("{s:i}", "b", (int)draw(random, 3));
        default: return json_pack("[b,f]", (int)draw(random, 2), 0.5);
    }
}

static void add_object(json_t *s, uint64_t *random, int depth) {
    static const char *const names[] = {"a", "ab", "b", "\xc3\xa9", "x\"y", "name"};
    json_t *properties = json_object(), *required = json_array();
    const uint64_t n = draw(random, 4);
    for (uint64_t i = 0; i < n; i++) json_object_set_new(properties, names[draw(random, 6)], make(random, depth - 1));
    for (uint64_t i = 0; i < 6; i++) {
        const int is_there = json_object_get(properties, names[i]) != NULL;
        if (draw(random, is_there ? 2 : 8) == 0) json_array_append_new(required, json_string(names[i]));
    }
    json_object_set_new(s, "properties", properties);
    json_object_set_new(s, "required", required);
    if (draw(random, 3) == 0)
        json_object_set_new(s, "additionalProperties", json_false());
    else if (draw(random, 3) == 0)
        json_object_set_new(s, "additionalProperties", make(random, depth - 1));
    if (draw(random, 5) == 0) {
        json_object_set_new(s, "patternProperties", json_pack("{s:o}", "^a", make(random, depth - 1)));
    }
}

static void add_array(json_t *s, uint64_t *random, int depth) {
    const int64_t least = (int64_t)draw(random, 4);
    if (draw(random, 3) == 0) json_object_set_new(s, "minItems", json_integer(least));
    if (draw(random, 2) == 0) json_object_set_new(s, "maxItems", json_integer(least + (int64_t)draw(random, 3)));
    if (draw(random, 4) != 0) json_object_set_new(s, "items", make(random, depth - 1));
    if (draw(random, 4) == 0) {
        json_object_set_new(s, "prefixItems", json_pack("[o,o]", make(random, depth - 1), make(random, depth - 1)));
    }
}

static void add_number(json_t *s, uint64_t *random) {
    const double least = (double)((int64_t)draw(random, 4000) - 2000) / (draw(random, 2) ? 1 : 8);
    const double most = least + (double)draw(random, 300) + 1;
    if (draw(random, 2)) json_object_set_new(s, draw(random, 2) ? "minimum" : "exclusiveMinimum", json_real(least));
    if (draw(random, 2)) json_object_set_new(s, draw(random, 2) ? "maximum" : "exclusiveMaximum", json_real(most));
    if (draw(random, 5) == 0) json_object_set_new(s, "multipleOf", json_integer((json_int_t)draw(random, 9) + 1));
}

static void add_union(json_t *s, uint64_t *random, int depth) {
    static const char *const types[] = {"string", "integer", "object", "array", "null"};
    json_t *branches = json_array();
    const int is_one = draw(random, 3) == 0;
    const uint64_t first = draw(random, 5);
    for (uint64_t i = 0; i < 2; i++) {
        json_t *branch = make(random, depth - 1);
        if (is_one && json_is_object(branch)) { /* of other types, so that they exclude each other */
            json_object_del(branch, "const");
            json_object_set_new(branch, "type", json_string(types[(first + i) % 5]));
        }
        json_array_append_new(branches, branch);
    }
    json_object_set_new(s, is_one ? "oneOf" : draw(random, 4) ? "anyOf" : "allOf", branches);
}

static json_t *make(uint64_t *random, int depth) {
    static const char *const types[] = {"object", "array", "string", "integer", "number", "boolean", "null"};
    const uint64_t kind = draw(random, depth > 0 ? 13 : 9);
    json_t *s = json_object();
    if (kind < 7) {
        if (draw(random, 6))
            json_object_set_new(s, "type", json_string(types[kind]));
        else
            json_object_set_new(s, "type", json_pack("[s,s]", types[kind], types[(kind + 3) % 7]));
    }
    if (kind == 0 && depth > 0) add_object(s, random, depth);
    if (kind == 1 && depth > 0) add_array(s, random, depth);
    if (kind == 2 && draw(random, 2)) json_object_set_new(s, "minLength", json_integer((json_int_t)draw(random, 4)));
    if (kind == 2 && draw(random, 2))
        json_object_set_new(s, "maxLength", json_integer((json_int_t)draw(random, 5) + 3));
    if (kind == 3 || kind == 4) add_number(s, random);
    if (kind == 7) json_object_set_new(s, "const", make_value(random));
    if (kind == 8) {
        json_object_set_new(s, "enum",
                            json_pack("[o,o,o]", make_value(random), make_value(random), make_value(random)));
    }
    if (kind == 9) json_object_set_new(s, "$ref", json_string(draw(random, 2) ? "#/$defs/one" : "#/$defs/two"));
    if (kind >= 10) add_union(s, random, depth);
    json_object_set_new(s, "description", json_string("of no meaning"));
    return s;
}

json_t *cpa_random_schema(uint64_t seed) {
    uint64_t random = cpa_mix64(seed + 77);
    json_t *s = make(&random, 3);
    json_object_set_new(s, "$defs", json_pack("{s:o,s:o}", "one", make(&random, 2), "two", make(&random, 2)));
    return s;
}

/* ---- Values ---- */

static int is_type(const json_t *value, const char *type) {
    if (strcmp(type, "null") == 0) return json_is_null(value);
    if (strcmp(type, "boolean") == 0) return json_is_boolean(value);
    if (strcmp(type, "string") == 0) return json_is_string(value);
    if (strcmp(type, "array") == 0) return json_is_array(value);
    if (strcmp(type, "object") == 0) return json_is_object(value);
    if (strcmp(type, "number") == 0) return json_is_number(value);
    return json_is_number(value) && floor(json_number_value(value)) == json_number_value(value);
}

static int has_type(const json_t *schema, const json_t *value) {
    const json_t *type = json_object_get(schema, "type");
    int found = !type || (json_is_string(type) && is_type(value, json_string_value(type)));
    for (size_t i = 0; i < json_array_size(type); i++) {
        found |= is_type(value, json_string_value(json_array_get(type, i)));
    }
    return found;
}

static int is_number_valid(const json_t *schema, double x) {
    const json_t *bound;
    if ((bound = json_object_get(schema, "minimum")) && x < json_number_value(bound)) return 0;
    if ((bound = json_object_get(schema, "maximum")) && x > json_number_value(bound)) return 0;
    if ((bound = json_object_get(schema, "exclusiveMinimum")) && x <= json_number_value(bound)) return 0;
    if ((bound = json_object_get(schema, "exclusiveMaximum")) && x >= json_number_value(bound)) return 0;
    return !(bound = json_object_get(schema, "multipleOf")) || fmod(x, json_number_value(bound)) == 0;
}

static int is_count_valid(const json_t *schema, const char *least_key, const char *most_key, int64_t n) {
    const json_t *least = json_object_get(schema, least_key), *most = json_object_get(schema, most_key);
    return (!least || n >= json_integer_value(least)) && (!most || n <= json_integer_value(most));
}

static int is_array_valid(const json_t *root, const json_t *schema, const json_t *value) {
    const json_t *prefix = json_object_get(schema, "prefixItems"), *items = json_object_get(schema, "items");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *own = i < json_array_size(prefix) ? json_array_get(prefix, i) : items;
        if (own && !cpa_is_valid(root, own, json_array_get(value, i))) return 0;
    }
    return is_count_valid(schema, "minItems", "maxItems", (int64_t)json_array_size(value));
}

static int is_object_valid(const json_t *root, const json_t *schema, const json_t *value) {
    const char *name;
    json_t *member;
    json_object_foreach((json_t *)(uintptr_t)value, name, member) {
        const json_t *own = json_object_get(json_object_get(schema, "properties"), name);
        const json_t *pattern =
            *name == 'a' ? json_object_get(json_object_get(schema, "patternProperties"), "^a") : NULL;
        const json_t *other = own || pattern ? NULL : json_object_get(schema, "additionalProperties");
        if (own && !cpa_is_valid(root, own, member)) return 0;
        if (pattern && !cpa_is_valid(root, pattern, member)) return 0;
        if (other && !cpa_is_valid(root, other, member)) return 0;
    }
    const json_t *required = json_object_get(schema, "required");
    for (size_t i = 0; i < json_array_size(required); i++) {
        if (!json_object_get(value, json_string_value(json_array_get(required, i)))) return 0;
    }
    return 1;
}

static int are_branches_valid(const json_t *root, const json_t *schema, const json_t *value) {
    static const char *const keys[] = {"allOf", "anyOf", "oneOf"};
    for (int k = 0; k < 3; k++) {
        const json_t *branches = json_object_get(schema, keys[k]);
        size_t n = 0;
        for (size_t i = 0; i < json_array_size(branches); i++) {
            n += (size_t)cpa_is_valid(root, json_array_get(branches, i), value);
        }
        if (branches && (k == 0 ? n != json_array_size(branches) : k == 1 ? n == 0 : n != 1)) return 0;
    }
    return 1;
}

static int is_listed(const json_t *schema, const json_t *value) {
    const json_t *constant = json_object_get(schema, "const"), *list = json_object_get(schema, "enum");
    int found = list == NULL;
    for (size_t i = 0; i < json_array_size(list); i++) found |= json_equal(json_array_get(list, i), value);
    return found && (!constant || json_equal(constant, value));
}

int cpa_is_valid(const json_t *root, const json_t *schema, const json_t *value) {
    if (json_is_boolean(schema)) return json_is_true(schema);
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    if (ref) {
        const json_t *target = json_object_get(json_object_get(root, "$defs"), strrchr(ref, '/') + 1);
        if (!cpa_is_valid(root, target, value)) return 0;
    }
    if (!has_type(schema, value) || !is_listed(schema, value)) return 0;
    if (json_is_number(value) && !is_number_valid(schema, json_number_value(value))) return 0;
    if (json_is_string(value)) {
        int64_t n = 0;
        for (const char *s = json_string_value(value); *s; s++) n += ((unsigned char)*s & 0xc0) != 0x80;
        if (!is_count_valid(schema, "minLength", "maxLength", n)) return 0;
    }
    if (json_is_array(value) && !is_array_valid(root, schema, value)) return 0;
    if (json_is_object(value) && !is_object_valid(root, schema, value)) return 0;
    return are_branches_valid(root, schema, value);
}
