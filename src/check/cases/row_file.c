#include "src/check/cases/row_file.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "src/check/cases/fields.h"

static const char FIRST_LINE[] = "cp_attn row 3";
static const char *const ALGORITHMS[] = {"local", "pass-kv", "pass-q", NULL};

#define FIELD(name, kind, ...)                                                                                         \
    { #name, kind, offsetof(cpa_row_file, name), __VA_ARGS__ }
static const cpa_case_field FIELDS[] = {
    FIELD(request, CPA_CASE_INT64, NULL),
    FIELD(token, CPA_CASE_INT64, NULL),
    FIELD(layer, CPA_CASE_INT32, NULL),
    FIELD(head, CPA_CASE_INT32, NULL),
    FIELD(kv_head, CPA_CASE_INT32, NULL),
    FIELD(ranks, CPA_CASE_INT32, NULL),
    FIELD(dtype, CPA_CASE_DTYPE, NULL),
    FIELD(algorithm, CPA_CASE_CHOICE, ALGORITHMS),
    FIELD(kv_dtype, CPA_CASE_DTYPE, NULL),
    FIELD(k_dim, CPA_CASE_INT32, NULL),
    FIELD(out_dim, CPA_CASE_INT32, NULL),
    FIELD(v_dim, CPA_CASE_INT32, NULL),
    FIELD(scale, CPA_CASE_DOUBLE, NULL),
    FIELD(softcap, CPA_CASE_DOUBLE, NULL),
    FIELD(temperature_len, CPA_CASE_DOUBLE, NULL),
    FIELD(slope, CPA_CASE_DOUBLE, NULL),
    FIELD(sink, CPA_CASE_DOUBLE, NULL),
    FIELD(has_sink, CPA_CASE_INT32, NULL),
    FIELD(error, CPA_CASE_DOUBLE, NULL),
    FIELD(tolerance, CPA_CASE_DOUBLE, NULL),
    FIELD(other_choice, CPA_CASE_INT32, NULL),
    FIELD(listed_key, CPA_CASE_INT64, NULL),
    FIELD(listed_score, CPA_CASE_DOUBLE, NULL),
    FIELD(missing_key, CPA_CASE_INT64, NULL),
    FIELD(missing_score, CPA_CASE_DOUBLE, NULL),
    FIELD(keys, CPA_CASE_INT64, NULL),
};
enum { N_FIELDS = sizeof FIELDS / sizeof *FIELDS, MOST_RANKS = 64 };

static int64_t matrix_elements(const cpa_row_file *row) {
    return (int64_t)row->v_dim * row->out_dim;
}

/* ---- writing ---- */

static cpa_status cannot(const char *what, const char *path, cpa_error *err) {
    return cpa_fail(err, CPA_INVALID, "%s: cannot be %s: %s", path, what, strerror(errno));
}

cpa_status cpa_row_file_create(const char *path, const cpa_row_file *row, FILE **out, cpa_error *err) {
    FILE *file = fopen(path, "wb");
    if (!file) return cannot("written", path, err);
    fprintf(file, "%s\n", FIRST_LINE);
    for (size_t i = 0; i < N_FIELDS; i++) {
        char value[64];
        cpa_case_field_print(&FIELDS[i], row, value, sizeof value);
        fprintf(file, "%s %s\n", FIELDS[i].name, value);
    }
    fputc('\n', file);
    fwrite(row->q, sizeof *row->q, (size_t)row->k_dim, file);
    fwrite(row->result, sizeof *row->result, (size_t)cpa_row_result_dim(row), file);
    fwrite(row->reference, sizeof *row->reference, (size_t)cpa_row_result_dim(row), file);
    if (row->out_dim > 0) fwrite(row->matrix, sizeof *row->matrix, (size_t)matrix_elements(row), file);
    *out = file;
    return CPA_OK;
}

void cpa_row_file_put(FILE *file, const cpa_row_file *row, cpa_row_file_key key, const float *k, const float *v) {
    fwrite(&key, sizeof key, 1, file);
    fwrite(k, sizeof *k, (size_t)row->k_dim, file);
    fwrite(v, sizeof *v, (size_t)row->v_dim, file);
}

cpa_status cpa_row_file_close(FILE *file, const char *path, cpa_error *err) {
    const int failed = ferror(file);
    if (fclose(file) != 0 || failed) return cannot("written", path, err);
    return CPA_OK;
}

/* ---- reading ---- */

static cpa_status wrong_line(const char *path, int line, const char *found, cpa_error *err) {
    return cpa_fail(err, CPA_INVALID, "%s:%d: found '%.80s', expected a row of `cp_attn --violation-dump`", path, line,
                    found);
}

/* A line without its end; 0 at the end of the file, and for a line that is too long. */
static int take_line(FILE *file, char *line, int size) {
    if (!fgets(line, size, file)) return 0;
    const size_t length = strlen(line);
    if (length == 0 || line[length - 1] != '\n') return 0;
    line[length - 1] = 0;
    return 1;
}

static cpa_status read_head(FILE *file, const char *path, cpa_row_file *row, cpa_error *err) {
    char line[128] = "";
    int n = 1;
    size_t set = 0;
    if (!take_line(file, line, sizeof line) || strcmp(line, FIRST_LINE) != 0) return wrong_line(path, n, line, err);
    for (n++; take_line(file, line, sizeof line) && line[0]; n++, set++) {
        char *value = strchr(line, ' ');
        if (!value) return wrong_line(path, n, line, err);
        *value++ = 0;
        const cpa_case_field *field = cpa_case_field_find(FIELDS, N_FIELDS, line);
        if (!field || !cpa_case_field_read(field, value, row)) return wrong_line(path, n, value, err);
    }
    if (line[0] || set != N_FIELDS) return wrong_line(path, n, line, err);
    return CPA_OK;
}

static int is_in(int64_t value, int64_t least, int64_t most) {
    return value >= least && value <= most;
}

/* Whether the numbers of the head belong to a row at all. */
static cpa_status check_head(const char *path, const cpa_row_file *row, cpa_error *err) {
    if (!is_in(row->k_dim, 1, CPA_MAX_HEAD_DIM) || !is_in(row->v_dim, 1, CPA_MAX_HEAD_DIM) ||
        !is_in(row->out_dim, 0, CPA_MAX_HEAD_DIM) || !is_in(row->ranks, 1, MOST_RANKS) ||
        !is_in(row->keys, 0, INT32_MAX) || !is_in(row->token, 0, (int64_t)1 << 40) ||
        cpa_dtype_is_quantised(row->dtype) || !isfinite(row->scale))
        return cpa_fail(
            err, CPA_INVALID,
            "%s: found widths %d, %d and %d, %d ranks, %lld keys, token %lld, %s queries and scale %g, which no "
            "row has",
            path, row->k_dim, row->v_dim, row->out_dim, row->ranks, (long long)row->keys, (long long)row->token,
            cpa_dtype_name(row->dtype), row->scale);
    return CPA_OK;
}

static int64_t bytes_behind_head(const cpa_row_file *row) {
    const int64_t key = (int64_t)sizeof(cpa_row_file_key) + (row->k_dim + row->v_dim) * (int64_t)sizeof(float);
    const int64_t result = cpa_row_result_dim(row) * (int64_t)(sizeof(float) + sizeof(double));
    return (row->k_dim + matrix_elements(row)) * (int64_t)sizeof(float) + result + row->keys * key;
}

static int take(FILE *file, void *to, size_t bytes) {
    return fread(to, 1, bytes, file) == bytes;
}

static cpa_status read_keys(FILE *file, const char *path, cpa_row_read *r, cpa_error *err) {
    const cpa_row_file *row = &r->row;
    for (int64_t i = 0; i < row->keys; i++) r->rank[i] = -1;
    for (int64_t i = 0; i < row->keys; i++) {
        cpa_row_file_key key;
        if (!take(file, &key, sizeof key)) return cannot("read", path, err);
        if (!is_in(key.index, 0, row->keys - 1) || !is_in(key.rank, 0, row->ranks - 1) || r->rank[key.index] >= 0)
            return cpa_fail(err, CPA_INVALID,
                            "%s: found key %lld of rank %d, expected each of %lld keys of %d ranks once", path,
                            (long long)key.index, key.rank, (long long)row->keys, row->ranks);
        r->rank[key.index] = key.rank;
        r->seen[key.index] = key.seen != 0;
        if (!take(file, r->k + key.index * row->k_dim, (size_t)row->k_dim * sizeof *r->k) ||
            !take(file, r->v + key.index * row->v_dim, (size_t)row->v_dim * sizeof *r->v))
            return cannot("read", path, err);
    }
    return CPA_OK;
}

static cpa_status read_row(FILE *file, const char *path, cpa_row_read *r, cpa_error *err) {
    cpa_row_file *row = &r->row;
    struct stat info;
    CPA_TRY(read_head(file, path, row, err));
    CPA_TRY(check_head(path, row, err));
    const int64_t left = fstat(fileno(file), &info) == 0 ? (int64_t)info.st_size - ftell(file) : -1;
    if (left != bytes_behind_head(row))
        return cpa_fail(err, CPA_INVALID, "%s: found %lld bytes behind its head, expected %lld", path, (long long)left,
                        (long long)bytes_behind_head(row));
    const size_t keys = (size_t)row->keys;
    r->rank = malloc(keys * sizeof *r->rank + 1);
    r->seen = malloc(keys + 1);
    r->k = malloc(keys * (size_t)row->k_dim * sizeof *r->k + 1);
    r->v = malloc(keys * (size_t)row->v_dim * sizeof *r->v + 1);
    r->matrix = malloc((size_t)matrix_elements(row) * sizeof *r->matrix + 1);
    if (!r->rank || !r->seen || !r->k || !r->v || !r->matrix)
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for %lld keys", path, (long long)row->keys);
    if (!take(file, row->q, (size_t)row->k_dim * sizeof *row->q) ||
        !take(file, row->result, (size_t)cpa_row_result_dim(row) * sizeof *row->result) ||
        !take(file, row->reference, (size_t)cpa_row_result_dim(row) * sizeof *row->reference) ||
        !take(file, r->matrix, (size_t)matrix_elements(row) * sizeof *r->matrix))
        return cannot("read", path, err);
    if (row->out_dim > 0) row->matrix = r->matrix;
    return read_keys(file, path, r, err);
}

cpa_status cpa_row_file_read(const char *path, cpa_row_read *out, cpa_error *err) {
    FILE *file = fopen(path, "rb");
    if (!file) return cannot("read", path, err);
    *out = (cpa_row_read){.row = {.request = 0}};
    const cpa_status status = read_row(file, path, out, err);
    fclose(file);
    if (status != CPA_OK) cpa_row_read_release(out);
    return status;
}

void cpa_row_read_release(cpa_row_read *read) {
    free(read->matrix);
    free(read->v);
    free(read->k);
    free(read->seen);
    free(read->rank);
    *read = (cpa_row_read){.row = {.request = 0}};
}
