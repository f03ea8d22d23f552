#include "program/field.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"

void cpa_text_quote(const char *text, size_t length, char *out, size_t bytes) {
    static const char more[] = "...";
    size_t room = bytes - 1;
    size_t kept = length <= room ? length : room - (sizeof more - 1);
    for (size_t i = 0; i < kept; i++) out[i] = isprint((unsigned char)text[i]) ? text[i] : '?';
    out[kept] = 0;
    if (kept < length) memcpy(out + kept, more, sizeof more);
}

void cpa_text_wrap(const char *text, int at, int indent, FILE *out) {
    enum { COLUMNS = 100 };
    while (*text) {
        int word = (int)strcspn(text, " ,"), spaces = 0;
        if (text[word] == ',') word++;
        while (text[word + spaces] == ' ') spaces++;
        if (at + word > COLUMNS && at > indent) at = fprintf(out, "\n%*s", indent, "") - 1;
        at += fprintf(out, "%.*s", word, text);
        text += word + spaces;
        /* No space is left at the end of a line. */
        if (*text && at + spaces + (int)strcspn(text, " ,") < COLUMNS)
            at += fprintf(out, "%*s", spaces, "");
        else if (*text && spaces)
            at = COLUMNS;
    }
    fputc('\n', out);
}

void cpa_field_print_help(const cpa_field *field, int show_initial, FILE *out) {
    enum { COLUMN = 34, WIDTH = 100, INDENT = 6 };
    char text[512];
    int at = fprintf(out, "  --%s", field->name);
    if (field->value_name && !field->choices) at += fprintf(out, " %s", field->value_name);
    for (int i = 0; field->choices && field->choices[i]; i++) {
        if (at + 1 + (int)strlen(field->choices[i]) > WIDTH) at = fprintf(out, "\n%*s", INDENT, "") - 1;
        at += fprintf(out, "%c%s", i ? '|' : ' ', field->choices[i]);
    }
    if (at + 2 > COLUMN) at = fprintf(out, "\n") - 1;
    fprintf(out, "%*s", COLUMN - at, "");
    int shown = show_initial && field->initial[0];
    snprintf(text, sizeof text, shown ? "%s [%s]" : "%s", field->help, field->initial);
    cpa_text_wrap(text, COLUMN, COLUMN, out);
}

static void describe(const cpa_field *field, char *out, size_t bytes) {
    size_t used = 0;
    switch (field->type) {
        case CPA_FIELD_FLAG: used = (size_t)snprintf(out, bytes, "true or false"); break;
        case CPA_FIELD_INT:
            used = (size_t)snprintf(out, bytes, "%s %" PRId64 " %s %" PRId64,
                                    field->power_of_two ? "a power of two between" : "an integer from",
                                    (int64_t)field->min, field->power_of_two ? "and" : "to", (int64_t)field->max);
            break;
        case CPA_FIELD_REAL:
            used = (size_t)snprintf(out, bytes, "a number from %g to %g", field->min, field->max);
            break;
        case CPA_FIELD_CHOICE:
            used = (size_t)snprintf(out, bytes, "one of");
            for (int i = 0; field->choices[i]; i++) {
                used += (size_t)snprintf(out + used, bytes - used, "%s %s", i ? "," : "", field->choices[i]);
            }
            break;
        case CPA_FIELD_TEXT: used = (size_t)snprintf(out, bytes, "at most %d bytes", CPA_TEXT_BYTES - 1); break;
        case CPA_FIELD_LONG_TEXT: used = (size_t)snprintf(out, bytes, "a text"); break;
    }
    if (field->word) snprintf(out + used, bytes - used, " or %s", field->word);
}

static int parse_flag(const char *text, int64_t *out) {
    static const char *const words[2][4] = {{"false", "no", "off", "0"}, {"true", "yes", "on", "1"}};
    for (int value = 0; value < 2; value++) {
        for (int i = 0; i < 4; i++) {
            if (strcmp(text, words[value][i]) == 0) {
                *out = value;
                return 1;
            }
        }
    }
    return 0;
}

static int parse_int(const cpa_field *field, const char *text, int64_t *out) {
    if (field->word && strcmp(text, field->word) == 0) {
        *out = (int64_t)field->word_value;
        return 1;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || isspace((unsigned char)*text)) return 0;
    if (value < (int64_t)field->min || value > (int64_t)field->max) return 0; /* bounds are exact as doubles */
    if (field->power_of_two && (value & (value - 1)) != 0) return 0;
    *out = value;
    return 1;
}

static int parse_real(const cpa_field *field, const char *text, double *out) {
    if (field->word && strcmp(text, field->word) == 0) {
        *out = field->word_value;
        return 1;
    }
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)*text)) return 0;
    if (!(value >= field->min && value <= field->max)) return 0; /* NaN is not in any range */
    *out = value;
    return 1;
}

static int parse_choice(const cpa_field *field, const char *text, int64_t *out) {
    for (int i = 0; field->choices[i]; i++) {
        if (strcmp(text, field->choices[i]) == 0) {
            *out = i;
            return 1;
        }
    }
    return 0;
}

/* A choice by another name. CPA_UNSUPPORTED, err saying why, for a word that stands for none on purpose. */
static cpa_status parse_named(const cpa_field *field, const char *text, int64_t *out, int *ok, cpa_error *err) {
    const char *name;
    cpa_status status = field->named(text, &name, err);
    if (status == CPA_OK) *ok = parse_choice(field, name, out);
    return status == CPA_UNSUPPORTED ? status : CPA_OK;
}

static int parse_text(const char *text, char *out) {
    size_t length = strlen(text);
    if (length >= CPA_TEXT_BYTES) return 0;
    memcpy(out, text, length + 1);
    return 1;
}

/* A copy in place of the text that was there; of an empty one none. */
static int parse_long_text(const char *text, void *value) {
    char *before, *copy = text[0] ? strdup(text) : NULL;
    if (text[0] && !copy) return 0;
    memcpy(&before, value, sizeof before);
    free(before);
    memcpy(value, &copy, sizeof copy);
    return 1;
}

cpa_status cpa_field_set(const cpa_field *field, void *object, const char *where, const char *text, cpa_error *err) {
    void *value = (char *)object + field->offset;
    int ok = 0;
    switch (field->type) {
        case CPA_FIELD_FLAG: ok = parse_flag(text, value); break;
        case CPA_FIELD_INT: ok = parse_int(field, text, value); break;
        case CPA_FIELD_REAL: ok = parse_real(field, text, value); break;
        case CPA_FIELD_CHOICE: ok = parse_choice(field, text, value); break;
        case CPA_FIELD_TEXT: ok = parse_text(text, value); break;
        case CPA_FIELD_LONG_TEXT: ok = parse_long_text(text, value); break;
    }
    if (!ok && field->named) {
        cpa_error why;
        if (parse_named(field, text, value, &ok, &why) != CPA_OK)
            return cpa_fail(err, CPA_INVALID, "%s: %s", where, why.message);
    }
    if (ok) return CPA_OK;
    if (field->type == CPA_FIELD_LONG_TEXT) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for it", where);
    char found[64], expected[192];
    cpa_text_quote(text, strlen(text), found, sizeof found);
    if (field->secret) snprintf(found, sizeof found, "(not shown)");
    describe(field, expected, sizeof expected);
    return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected %s", where, found, expected);
}

void cpa_field_format(const cpa_field *field, const void *object, char *out, size_t bytes) {
    const void *value = (const char *)object + field->offset;
    int64_t integer = 0;
    double real = 0;
    if (field->type == CPA_FIELD_REAL) {
        memcpy(&real, value, sizeof real);
    } else if (field->type != CPA_FIELD_TEXT && field->type != CPA_FIELD_LONG_TEXT) {
        memcpy(&integer, value, sizeof integer);
        real = (double)integer;
    }
    if (field->word && real == field->word_value) {
        snprintf(out, bytes, "%s", field->word);
        return;
    }
    switch (field->type) {
        case CPA_FIELD_FLAG: snprintf(out, bytes, "%s", integer ? "true" : "false"); break;
        case CPA_FIELD_INT: snprintf(out, bytes, "%" PRId64, integer); break;
        case CPA_FIELD_REAL:
            snprintf(out, bytes, "%.15g", real); /* as short as it was written, if that is exact */
            if (strtod(out, NULL) != real) snprintf(out, bytes, "%.17g", real);
            break;
        case CPA_FIELD_CHOICE: snprintf(out, bytes, "%s", field->choices[integer]); break;
        case CPA_FIELD_TEXT: snprintf(out, bytes, "%s", (const char *)value); break;
        case CPA_FIELD_LONG_TEXT: {
            const char *text;
            memcpy(&text, value, sizeof text);
            snprintf(out, bytes, "%s", text ? text : "");
        }
    }
}

static char plain(char c) {
    return c == '_' ? '-' : c;
}

/* Whether the first `length` bytes of `name` are the name that a field is known by. */
static int is_named(const char *known, const char *name, size_t length) {
    size_t i = 0;
    while (i < length && plain(name[i]) == plain(known[i])) i++;
    return i == length && known[i] == 0;
}

const cpa_field *cpa_field_find(const cpa_field *fields, int n_fields, const char *name, size_t name_length) {
    for (int f = 0; f < n_fields; f++) {
        if (is_named(fields[f].name, name, name_length)) return &fields[f];
        if (fields[f].alias && is_named(fields[f].alias, name, name_length)) return &fields[f];
    }
    return NULL;
}

const cpa_field *cpa_field_nearest(const cpa_field *fields, int n_fields, const char *name, size_t name_length) {
    const cpa_field *nearest = NULL;
    if (name_length > CPA_NAME_BYTES) return NULL;
    int best = (int)name_length / 2; /* a name that shares less than half of its letters is another name */
    for (int f = 0; f < n_fields; f++) {
        int distance = cpa_name_distance(name, name_length, fields[f].name, strlen(fields[f].name));
        if (distance <= best && (!nearest || distance < best)) {
            nearest = &fields[f];
            best = distance;
        }
    }
    return nearest;
}

cpa_status cpa_field_read_argument(const cpa_field *fields, int n_fields, const char *program, int argc, char **argv,
                                   int *i, void *object, const cpa_field **out, cpa_error *err) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    const size_t length = strcspn(arg, "=");
    const char *value = arg[length] ? arg + length + 1 : NULL;
    const cpa_field *field = NULL;
    char text[64];
    if (strncmp(arg, "--", 2) == 0) field = cpa_field_find(fields, n_fields, arg + 2, length - 2);
    if (!field && !value && strncmp(arg, "--no-", 5) == 0) {
        field = cpa_field_find(fields, n_fields, arg + 5, length - 5);
        if (field && field->type != CPA_FIELD_FLAG) field = NULL;
        value = "false";
    }
    if (!field) {
        cpa_text_quote(arg, strlen(arg), text, sizeof text);
        return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected an option of 'cp_attn %s --help'", program, text,
                        program);
    }
    if (!value && field->type == CPA_FIELD_FLAG) value = "true";
    if (!value && *i + 1 < argc) value = argv[++*i];
    if (!value) {
        return cpa_fail(err, CPA_INVALID, "%s: --%s: found the end of the command line, expected %s", program,
                        field->name, field->value_name ? field->value_name : "a value");
    }
    snprintf(text, sizeof text, "%s: --%s", program, field->name);
    CPA_TRY(cpa_field_set(field, object, text, value, err));
    *out = field;
    return CPA_OK;
}
