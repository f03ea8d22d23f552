#include "src/check/cases/fields.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/shape.h>

static void print_set(const cpa_case_field *field, int32_t set, char *out, size_t size) {
    out[0] = 0;
    for (int bit = 0; field->names[bit]; bit++) {
        const size_t used = strlen(out);
        if (set >> bit & 1) snprintf(out + used, size - used, "%s%s", used ? "+" : "", field->names[bit]);
    }
}

/* The bits whose names stand in a text, which are longer than none. */
static int read_set(const cpa_case_field *field, const char *text, int32_t *out) {
    for (*out = 0; *text; text += strcspn(text, "+"), text += *text == '+') {
        int bit = 0;
        const size_t length = strcspn(text, "+");
        while (field->names[bit] &&
               (strlen(field->names[bit]) != length || memcmp(field->names[bit], text, length) != 0))
            bit++;
        if (!field->names[bit]) return 0;
        *out |= 1 << bit;
    }
    return 1;
}

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
        case CPA_CASE_SET: print_set(field, narrow, out, size); break;
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

static int put(void *member, const void *value, size_t bytes) {
    memcpy(member, value, bytes);
    return 1;
}

static int read_dtype(const char *text, int32_t *out) {
    for (*out = 0; cpa_dtype_traits_of((cpa_dtype)*out); ++*out)
        if (strcmp(cpa_dtype_name((cpa_dtype)*out), text) == 0) return 1;
    return 0;
}

static int read_choice(const char *const *names, const char *text, int32_t *out) {
    for (*out = 0; names[*out]; ++*out)
        if (strcmp(names[*out], text) == 0) return 1;
    return 0;
}

int cpa_case_field_read(const cpa_case_field *field, const char *text, void *of) {
    char *member = (char *)of + field->at;
    int64_t whole;
    int32_t narrow;
    double real;
    switch (field->kind) {
        case CPA_CASE_INT32:
            if (!read_whole(text, INT32_MIN, INT32_MAX, &whole)) return 0;
            narrow = (int32_t)whole;
            return put(member, &narrow, sizeof narrow);
        case CPA_CASE_INT64: return read_whole(text, INT64_MIN, INT64_MAX, &whole) && put(member, &whole, sizeof whole);
        case CPA_CASE_FLOAT: return read_real(text, &real) && put(member, &(float){(float)real}, sizeof(float));
        case CPA_CASE_DOUBLE: return read_real(text, &real) && put(member, &real, sizeof real);
        case CPA_CASE_DTYPE: return read_dtype(text, &narrow) && put(member, &narrow, sizeof narrow);
        case CPA_CASE_CHOICE: return read_choice(field->names, text, &narrow) && put(member, &narrow, sizeof narrow);
        case CPA_CASE_SET: return read_set(field, text, &narrow) && put(member, &narrow, sizeof narrow);
    }
    return 0;
}

const cpa_case_field *cpa_case_field_find(const cpa_case_field *fields, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(fields[i].name, name) == 0) return &fields[i];
    return NULL;
}

const char *cpa_case_fields_print(const cpa_case_field *fields, size_t n, const void *of, char *out, size_t size) {
    char value[128];
    out[0] = 0;
    for (size_t i = 0; i < n; i++) {
        static const char zero[sizeof(double)];
        const int is_wide = fields[i].kind == CPA_CASE_INT64 || fields[i].kind == CPA_CASE_DOUBLE;
        const size_t used = strlen(out), bytes = is_wide ? sizeof(int64_t) : sizeof(int32_t);
        if (memcmp((const char *)of + fields[i].at, zero, bytes) == 0) continue;
        cpa_case_field_print(&fields[i], of, value, sizeof value);
        snprintf(out + used, size - used, "%s%s=%s", used ? " " : "", fields[i].name, value);
    }
    return out;
}

int cpa_case_fields_read(const cpa_case_field *fields, size_t n, const char *text, void *of, char *wrong, size_t size) {
    for (text += strspn(text, " "); *text; text += strspn(text, " ")) {
        char word[128];
        const size_t length = strcspn(text, " ");
        snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : sizeof word - 1), text);
        snprintf(wrong, size, "%s", word);
        text += length;
        char *value = strchr(word, '=');
        if (!value) return 0;
        *value++ = 0;
        const cpa_case_field *field = cpa_case_field_find(fields, n, word);
        if (!field || !cpa_case_field_read(field, value, of)) return 0;
    }
    return 1;
}
