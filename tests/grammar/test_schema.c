/* JSON schemas: every answer is valid, what is not known is refused by its name. */
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"
#include "tests/grammar/random_schema.h"
#include "tests/grammar/walk.h"

/* Every answer of a walk is JSON and valid; every refusal names a limit that is known. */
static void answers_to_random_schemas_are_valid(void) {
    static const char *const reasons[] = {"no answer of at most", "oneOf: expected alternatives", "it names itself",
                                          "multipleOf: expected", "alternatives for one value"};
    cpa_walk_vocabulary v[2];
    char *text = malloc(CPA_WALK_TEXT);
    CU_ASSERT_FATAL(text && cpa_walk_vocabulary_make(&v[0], 0) && cpa_walk_vocabulary_make(&v[1], 1));
    int walked = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        json_t *schema = cpa_random_schema(seed), *constraint = json_pack("{s:O}", "json_schema", schema);
        char *line = json_dumps(constraint, 0);
        for (uint64_t walk = 0; walk < 4; walk++) {
            cpa_error err = {.message = ""};
            const cpa_walk_result result = cpa_walk(&v[walk % 2], line, seed * 10 + walk, text, &err);
            if (result == CPA_WALK_REFUSED) {
                int is_known = 0;
                for (int i = 0; i < 5; i++) is_known |= strstr(err.message, reasons[i]) != NULL;
                if (!is_known) printf("\n    %s: %s ", line, err.message);
                CU_ASSERT(is_known);
                break;
            }
            json_t *value = json_loads(text, JSON_DECODE_ANY, NULL);
            const int is_valid = result == CPA_WALK_WHOLE && value && cpa_is_valid(schema, schema, value);
            if (!is_valid) printf("\n    %d: %s\n    %.300s ", (int)result, line, text);
            CU_ASSERT(is_valid);
            walked += walk == 0;
            json_decref(value);
        }
        free(line);
        json_decref(constraint);
        json_decref(schema);
    }
    CPA_ASSERT_ORDER(walked, >=, 290);
    free(text);
    for (int i = 0; i < 2; i++) cpa_walk_vocabulary_release(&v[i]);
}

/* A text is taken whole, or not at all. */
static void check(const cpa_walk_vocabulary *v, const char *schema, const char *text, int expected) {
    char line[2000];
    cpa_constraint *answer = NULL;
    cpa_error err = {.message = ""};
    snprintf(line, sizeof line, "{\"json_schema\": %s}", schema);
    CU_ASSERT_EQUAL(cpa_constraint_open(v->constraints, line, strlen(line), &answer, &err), CPA_OK);
    if (!answer) printf("\n    %s: %s ", schema, err.message);
    int is_taken = answer != NULL;
    for (const char *c = text; is_taken && *c; c++)
        is_taken = cpa_constraint_accept(answer, (uint8_t)*c, &err) == CPA_OK;
    is_taken = is_taken && cpa_constraint_is_whole(answer);
    if (is_taken != expected) printf("\n    %s on %s: %d, not %d ", schema, text, is_taken, expected);
    CU_ASSERT_EQUAL(is_taken, expected);
    cpa_constraint_close(answer);
}

static void keywords_mean_what_the_specification_says(void) {
    static const struct {
        const char *schema, *valid, *invalid;
    } cases[] = {
        {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"b\": {}}, \"required\": [\"b\"]}",
         "{\"a\": 1, \"b\": [null]}", "{\"a\": 1}"},
        {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"additionalProperties\": false}", "{}", "{\"b\": 1}"},
        {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"additionalProperties\": {\"type\": \"null\"}}",
         "{\"a\":1,\"ab\":null,\"\":null}", "{\"c\":1}"},
        {"{\"type\": \"object\", \"patternProperties\": {\"^x\": {\"type\": \"integer\"}, \"y$\": {\"minimum\": 5}}, "
         "\"additionalProperties\": false}",
         "{\"xa\":1,\"xy\":7}", "{\"xy\":3}"},
        {"{\"allOf\": [{\"properties\": {\"a\": {\"minimum\": 3}}}, {\"properties\": {\"a\": {\"maximum\": 5}}}], "
         "\"type\": \"object\", \"required\": [\"a\"]}",
         "{\"a\":4}", "{\"a\":6}"},
        {"{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"minItems\": 1, \"maxItems\": 2}",
         "[true,\n  false\n]", "[]"},
        {"{\"type\": \"array\", \"prefixItems\": [{\"const\": 1}, {\"const\": 2}], \"items\": false}", "[1, 2]",
         "[1,2,3]"},
        {"{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}", "\"\xc3\xa9\\n\\ud83d\\ude00\"", "\"\\u00e9\""},
        {"{\"type\": \"string\", \"pattern\": \"^[\\\"\\\\\\\\n]+$\"}", "\"\\\"\\\\n\"", "\"\\n\""},
        {"{\"type\": \"string\", \"pattern\": \"a\", \"maxLength\": 2}", "\"ba\"", "\"bba\""},
        {"{\"type\": \"number\", \"minimum\": -1.5, \"exclusiveMaximum\": 2.25}", "-1.5", "2.25"},
        {"{\"type\": \"number\", \"minimum\": -1.5, \"exclusiveMaximum\": 2.25}", "2.2499", "-1.51"},
        {"{\"type\": \"number\", \"exclusiveMinimum\": 0}", "0.001", "0.000"},
        {"{\"type\": \"number\", \"exclusiveMaximum\": 0}", "-0.5", "-0"},
        {"{\"type\": \"integer\", \"minimum\": -120, \"maximum\": 1075}", "1075", "1076"},
        {"{\"type\": \"integer\", \"minimum\": -120, \"maximum\": 1075}", "-99", "-121"},
        {"{\"type\": \"integer\", \"multipleOf\": 7, \"minimum\": 100}", "105", "101"},
        {"{\"enum\": [1, \"a\", null, [2]], \"type\": [\"string\", \"array\"]}", "[2]", "1"},
        {"{\"const\": {\"a\": \"\xc3\xa9\\n\"}}", "{\"a\":\"\xc3\xa9\\n\"}", "{\"a\":1}"},
        {"{\"oneOf\": [{\"type\": \"integer\"}, {\"type\": \"string\"}]}", "\"x\"", "null"},
        {"{\"oneOf\": [{\"properties\": {\"k\": {\"const\": 1}}, \"required\": [\"k\"]}, {\"properties\": {\"k\": "
         "{\"const\": 2}, \"v\": {\"type\": \"null\"}}, \"required\": [\"k\"]}], \"type\": \"object\"}",
         "{\"k\":2,\"v\":null}", "{\"k\":2,\"v\":1}"},
        {"{\"$ref\": \"#/$defs/n\", \"$defs\": {\"n\": {\"type\": [\"array\", \"null\"], \"items\": {\"$ref\": "
         "\"#/$defs/n\"}}}}",
         "[[null],[]]", "[1]"},
        {"{\"$ref\": \"#/definitions/a~1b\", \"definitions\": {\"a/b\": {\"const\": true}}}", "true", "false"},
        {"{\"type\": \"string\", \"format\": \"date\"}", "\"2024-02-29\"", "\"2023-02-29\""},
        {"{\"type\": \"string\", \"format\": \"ipv6\"}", "\"::ffff:1\"", "\"1:2\""},
        {"{\"type\": \"string\", \"format\": \"uuid\"}", "\"01234567-89ab-cdef-0123-456789ABCDEF\"", "\"0123\""},
        {"{\"type\": [\"integer\", \"null\"], \"title\": \"t\", \"default\": 1, \"examples\": [2]}", "null", "1.5"},
        {"{}", "{\"a\": [1e5, -0.5, \"\\u00e9\", {}, [], true]}", "{\"a\": }"},
        {"true", "\"\\ud83d\\ude00\"", "\"\\ud83d\""},
    };
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&v, cases[i].schema, cases[i].valid, 1);
        check(&v, cases[i].schema, cases[i].invalid, 0);
    }
    cpa_walk_vocabulary_release(&v);
}

static void what_is_not_known_is_refused_by_its_name_and_place(void) {
    static const struct {
        const char *schema, *line;
    } cases[] = {
        {"{\"not\": {}}", "#: the keyword not is"},
        {"{\"properties\": {\"a\": {\"uniqueItems\": true}}}", "#/properties/a: the keyword uniqueItems"},
        {"{\"items\": {\"anyOf\": [{\"if\": {}}]}}", "#/items/anyOf/0: the keyword if"},
        {"{\"minProperties\": 1}", "the keyword minProperties"},
        {"{\"unevaluatedProperties\": false}", "the keyword unevaluatedProperties"},
        {"{\"x-mine\": 1}", "the keyword x-mine"},
        {"{\"type\": \"string\", \"format\": \"idn-email\"}", "format: idn-email"},
        {"{\"type\": \"string\", \"pattern\": \"a(?=b)\"}", "pattern a(?=b): at byte 3"},
        {"{\"$ref\": \"http://a/b\"}", "$ref: found http://a/b"},
        {"{\"$ref\": \"#/$defs/x\"}", "$ref: found #/$defs/x"},
        {"{\"$defs\": {\"a\": {\"anyOf\": [{\"$ref\": \"#/$defs/a\"}, {}]}}, \"$ref\": \"#/$defs/a\"}",
         "it names itself"},
        {"{\"type\": \"object\", \"properties\": {\"a\": {\"$ref\": \"#\"}}, \"required\": [\"a\"]}", "no answer"},
        {"{\"oneOf\": [{\"minimum\": 1}, {\"maximum\": 5}]}", "oneOf: expected alternatives"},
        {"{\"multipleOf\": 0.01}", "multipleOf: expected"},
        {"{\"minimum\": 0.12345678901234567, \"type\": \"number\"}", "has more than 15 digits"},
        {"{\"type\": \"text\"}", "type: expected names"},
        {"{\"properties\": []}", "properties: expected an object"},
        {"{\"type\": \"array\", \"minItems\": 1000000}", "too large"},
        {"{\"type\": \"string\", \"minLength\": -1}", "minLength: expected"},
        {"{\"exclusiveMinimum\": true}", "exclusiveMinimum: expected a number"},
        {"{\"items\": 5}", "items: expected a schema"},
    };
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[1000];
        cpa_constraint *answer = NULL;
        cpa_error err = {.message = ""};
        snprintf(line, sizeof line, "{\"json_schema\": %s}", cases[i].schema);
        CU_ASSERT_NOT_EQUAL(cpa_constraint_open(v.constraints, line, strlen(line), &answer, &err), CPA_OK);
        if (!strstr(err.message, cases[i].line)) printf("\n    %s: %s ", cases[i].schema, err.message);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].line));
        cpa_constraint_close(answer);
    }
    cpa_walk_vocabulary_release(&v);
}

static const cpa_test tests[] = {
    {"answers to random schemas are valid", answers_to_random_schemas_are_valid},
    {"keywords mean what the specification says", keywords_mean_what_the_specification_says},
    {"what is not known is refused by its name and place", what_is_not_known_is_refused_by_its_name_and_place},
};
CPA_TEST_MAIN("schema", tests)
