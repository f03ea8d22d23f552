/* One row of attention in a file: what the sampled check had of a row that was wrong, for `cp_attn check`.
 *
 * The file begins with lines of text, "cp_attn row 3" and then a name and a value each, up to an empty line. Behind
 * it, in the byte order of the machine: float q[k_dim], float result[n], double reference[n], n being v_dim, or
 * where the result is O times a matrix its out_dim, and then float matrix[v_dim][out_dim]; and for each of `keys`
 * keys int64_t index, int32_t rank, int32_t seen, float k[k_dim], float v[v_dim], in any order. Keys and values are
 * as the cache held them. */
#ifndef CPA_CASES_ROW_FILE_H
#define CPA_CASES_ROW_FILE_H

#include <stdio.h>

#include <cpattn/shape.h>
#include <cpattn/status.h>

#include "src/check/reference.h"

typedef struct cpa_row_file {
    uint64_t request;
    int64_t token; /* the index of the query in its sequence */
    int32_t layer, head, kv_head;
    int32_t ranks, algorithm; /* cpa_algorithm; 0: the keys lay on one rank */
    cpa_dtype dtype, kv_dtype;
    int32_t k_dim, v_dim;
    int32_t out_dim; /* 0: the result is O */
    double scale;
    double softcap, temperature_len, slope, sink; /* as in cpa_reference_rules */
    int32_t has_sink;
    double error, tolerance; /* error beside the reference, and what was allowed, as the check had them */
    /* 1: what is wrong with the row is which keys an indexer chose for it. Then, by the indexer's scores, the worst key
     * that was chosen and the best one that was not; -1: there is none. */
    int32_t other_choice;
    int64_t listed_key, missing_key;
    double listed_score, missing_score;
    int64_t keys;
    float q[CPA_MAX_HEAD_DIM], result[CPA_MAX_HEAD_DIM];
    double reference[CPA_MAX_HEAD_DIM];
    const float *matrix; /* with out_dim */
} cpa_row_file;

/* Elements of a result. */
static inline int32_t cpa_row_result_dim(const cpa_row_file *row) {
    return row->out_dim > 0 ? row->out_dim : row->v_dim;
}

/* A key in the file; its elements follow it. */
typedef struct cpa_row_file_key {
    int64_t index;      /* in the sequence, 0 to keys - 1 */
    int32_t rank, seen; /* the rank that held it; whether the row sees it */
} cpa_row_file_key;

/* A file being written: open, `keys` times key, close, whose status says whether all of it is in the file. On failure
 * `err` says why, with the path. */
cpa_status cpa_row_file_create(const char *path, const cpa_row_file *row, FILE **out, cpa_error *err);
void cpa_row_file_put(FILE *file, const cpa_row_file *row, cpa_row_file_key key, const float *k, const float *v);
cpa_status cpa_row_file_close(FILE *file, const char *path, cpa_error *err);

/* A row that was read: key i of the sequence, its elements at k + i * k_dim and v + i * v_dim. */
typedef struct cpa_row_read {
    cpa_row_file row; /* whose matrix is here */
    float *matrix;
    int32_t *rank; /* [keys] */
    uint8_t *seen; /* [keys] */
    float *k, *v;
} cpa_row_read;

/* CPA_INVALID with one line for a file that is not such a row, whatever it holds. To be released on success. */
cpa_status cpa_row_file_read(const char *path, cpa_row_read *out, cpa_error *err);
void cpa_row_read_release(cpa_row_read *read);

#endif
