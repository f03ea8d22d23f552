/* What a case does to scores (cpattn/score.h): its rules, its mask of bits and its bias on the host, their copy on a
 * device, and what the reference makes of them. */
#ifndef CPA_CASES_SCORE_H
#define CPA_CASES_SCORE_H

#include <cpattn/ops.h>

#include "src/check/reference.h"

/* Arrays are on the host, of `rows` entries where they go by rows; NULL or 0 is nothing. Freed by
 * cpa_case_score_release. */
typedef struct cpa_case_score {
    int32_t q_heads;
    int64_t rows;
    float softcap, temperature_len;
    float *slopes, *sinks; /* [q_heads] */
    uint32_t *bits;
    int64_t n_words;
    int64_t *row_word, *first; /* [rows] */
    int32_t *width;
    void *bias; /* [rows, q_heads or 1, bias_width] */
    cpa_dtype bias_dtype;
    int per_head;
    int64_t bias_first, bias_width;
    int32_t *row_map; /* [rows], of the bias and of the selection; NULL: the identity */
    int32_t *lists;   /* [rows, kv_heads, list_width], entries of `unit` tokens */
    int32_t *counts;  /* [rows] */
    int32_t kv_heads, list_width, unit;
    uint32_t *blocks;    /* [n_block_words], from block_word on [q_heads, words of n_blocks bits] */
    int64_t *block_word; /* [rows] */
    int64_t n_block_words;
    int32_t n_blocks, block;
} cpa_case_score;

/* The same on a device. */
typedef struct cpa_case_score_on_device {
    cpa_score_rules rules;
    cpa_key_selection selection; /* filled by cpa_case_score_selection */
    cpa_key_bits bits;
    cpa_key_indices indices;
    cpa_key_blocks blocks;
    cpa_score_bias bias;
} cpa_case_score_on_device;

void cpa_case_score_release(cpa_case_score *score);

/* Slopes 2^(-8 (h + 1) / heads), those of Press et al.; and sinks from -2 to 3, the last -inf. `err` may be NULL. */
float cpa_case_slope(int32_t head, int32_t q_heads);
cpa_status cpa_case_score_add_slopes(cpa_case_score *score, cpa_error *err);
cpa_status cpa_case_score_add_sinks(cpa_case_score *score, cpa_error *err);
/* A bias between -2 and 2 on the keys [first, first + width), one in 16 -inf. */
cpa_status cpa_case_score_add_bias(cpa_case_score *score, cpa_dtype dtype, int per_head, int64_t first, int64_t width,
                                   cpa_error *err);
/* Random bits, of every row for the keys [first, first + width), the entries in another order than the rows (row_map),
 * every seventh row without. */
cpa_status cpa_case_score_add_bits(cpa_case_score *score, int64_t first, int32_t width, cpa_error *err);
/* Other bits in the place of those, of every row: what `sees` says of a row and a key. */
void cpa_case_score_fill_bits(cpa_case_score *score, int (*sees)(const void *ctx, int64_t row, int64_t key),
                              const void *ctx);

/* To be freed whatever the status. */
cpa_status cpa_case_score_upload(const cpa_case_score *score, cpa_stream *stream, cpa_case_score_on_device *out,
                                 cpa_error *err);
void cpa_case_score_free(cpa_case_score_on_device *score, cpa_device *device);
/* The selection that the score has, in it; NULL: none. */
const cpa_key_selection *cpa_case_score_selection(cpa_case_score_on_device *score);
/* An attend with what the score has; both must outlive it. */
void cpa_case_score_set(cpa_case_score_on_device *score, cpa_attend_args *args);

/* Of a row of q whose query has index `query`; score may be NULL. */
cpa_reference_rules cpa_case_score_rules(const cpa_case_score *score, int32_t head, int64_t query);
int cpa_case_score_sees(const cpa_case_score *score, cpa_mask mask, int64_t row, int32_t head, int64_t query,
                        int64_t key);
float cpa_case_score_bias(const cpa_case_score *score, int64_t row, int32_t head, int64_t key);

#endif
