#include "src/check/cases/fields.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/shape.h>

void cpa_case_field_print(const cpa_case_field *field, const void *of, char *out, size_t size) {
    const char *member = (const char *)of + field->at;
    int64_t whole = 0;
    int32_t narrow = 0;
    double real = 0;
    float single = 0;
    memcpy(&narrow, member, sizeof narrow);
    switch (field->kind) {
        case CPA_CASE_INT32: snprintf(out, size, "%d", narrow); break;
        case CPA_CASE_INT64:
            memcpy(&whole, member, sizeof whole);
            snprintf(out, size, "%lld", (long long)whole);
            break;
        case CPA_CASE_FLOAT:
            memcpy(&single, member, sizeof single);
            snprintf(out, size, "%.9g", (double)single);
            break;
        case CPA_CASE_DOUBLE:
            memcpy(&real, member, sizeof real);
            snprintf(out, size, "%.17g", real);
            break;
        case CPA_CASE_DTYPE: snprintf(out, size, "%s", cpa_dtype_name((cpa_dtype)narrow)); break;
        case CPA_CASE_CHOICE: snprintf(out, size, "%s", field->names[narrow]); break;
    }
}

/* A whole number from `least` to `most`. */
static int read_whole(const char *text, int64_t least, int64_t most, int64_t *out) {
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10);
    return end != text && *end == 0 && errno == 0 && *out >= least && *out <= most;
}

static int read_real(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return end != text && *end == 0;
}

int cpa_case_field_read(const cpa_case_field *field, const char *text, void *of) {
    char *member = (char *)of + field->at;
    int64_t whole = 0;
    int32_t narrow = 0;
    double real;
    float single;
    switch (field->kind) {
        case CPA_CASE_INT32:
            if (!read_whole(text, INT32_MIN, INT32_MAX, &whole)) return 0;
            narrow = (int32_t)whole;
            memcpy(member, &narrow, sizeof narrow);
            return 1;
        case CPA_CASE_INT64:
            if (!read_whole(text, INT64_MIN, INT64_MAX, &whole)) return 0;
            memcpy(member, &whole, sizeof whole);
            return 1;
        case CPA_CASE_FLOAT:
            if (!read_real(text, &real)) return 0;
            single = (float)real;
            memcpy(member, &single, sizeof single);
            return 1;
        case CPA_CASE_DOUBLE:
            if (!read_real(text, &real)) return 0;
            memcpy(member, &real, sizeof real);
            return 1;
        case CPA_CASE_DTYPE:
            for (narrow = 0; cpa_dtype_traits_of((cpa_dtype)narrow); narrow++)
                if (strcmp(cpa_dtype_name((cpa_dtype)narrow), text) == 0) break;
            if (!cpa_dtype_traits_of((cpa_dtype)narrow)) return 0;
            memcpy(member, &narrow, sizeof narrow);
            return 1;
        case CPA_CASE_CHOICE:
            while (field->names[narrow] && strcmp(field->names[narrow], text) != 0) narrow++;
            if (!field->names[narrow]) return 0;
            memcpy(member, &narrow, sizeof narrow);
            return 1;
    }
    return 0;
}

const cpa_case_field *cpa_case_field_find(const cpa_case_field *fields, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(fields[i].name, name) == 0) return &fields[i];
    return NULL;
}
