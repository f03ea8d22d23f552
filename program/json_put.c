#include "program/json_put.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "program/output_file.h"

int cpa_json_put_int(json_t *object, const char *key, int64_t value) {
    return json_object_set_new(object, key, json_integer(value));
}

int cpa_json_put_real(json_t *object, const char *key, double value) {
    return json_object_set_new(object, key, isfinite(value) ? json_real(value) : json_null());
}

int cpa_json_put_text(json_t *object, const char *key, const char *value) {
    char printable[CPA_TEXT_BYTES];
    json_t *text = json_string(value);
    if (!text) {
        cpa_text_quote(value, strlen(value), printable, sizeof printable);
        text = json_string(printable);
    }
    return json_object_set_new(object, key, text);
}

int cpa_json_put_field(json_t *object, const cpa_field *field, const void *values) {
    const void *value = (const char *)values + field->offset;
    char text[CPA_TEXT_BYTES];
    int64_t integer;
    double real;
    cpa_field_format(field, values, text, sizeof text);
    if (field->secret && text[0]) return cpa_json_put_text(object, field->name, "(not shown)");
    if (field->word && strcmp(text, field->word) == 0) return cpa_json_put_text(object, field->name, text);
    switch (field->type) {
        case CPA_FIELD_FLAG:
            memcpy(&integer, value, sizeof integer);
            return json_object_set_new(object, field->name, json_boolean(integer));
        case CPA_FIELD_INT:
            memcpy(&integer, value, sizeof integer);
            return cpa_json_put_int(object, field->name, integer);
        case CPA_FIELD_REAL:
            memcpy(&real, value, sizeof real);
            if (isfinite(real)) return cpa_json_put_real(object, field->name, real);
            break;
        case CPA_FIELD_CHOICE:
        case CPA_FIELD_TEXT:
        case CPA_FIELD_LONG_TEXT: break;
    }
    return cpa_json_put_text(object, field->name, text);
}

cpa_status cpa_json_write(const char *path, const json_t *root, cpa_error *err) {
    cpa_output_file output;
    CPA_TRY(cpa_output_open(path, &output, err));
    const int whole = json_dumpf(root, output.file, JSON_INDENT(2)) == 0 && fputc('\n', output.file) != EOF;
    return cpa_output_close(&output, whole, err);
}
