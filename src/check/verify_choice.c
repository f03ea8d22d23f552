#include "src/check/verify_choice.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/device.h"
#include "src/check/reference_rows.h"
#include "src/check/vector_loops.h"

enum { LANES = 16, TENSOR_CORE_TERMS = 32 };

static const cpa_index_form *form_of(const cpa_verify *verify) {
    return verify->worker->options.model.index;
}

/* Codes or elements as floats, without a scale. */
static void widen(const void *from, cpa_dtype dtype, int32_t n, float *out) {
    cpa_reference_read_rows(from, NULL, dtype, CPA_KEYS, 1, 1, n, out);
}

void cpa_verify_read_index(const cpa_verify *verify, const cpa_verify_piece *piece, int64_t first, int64_t n,
                           cpa_verify_index_keys *keys) {
    const cpa_index_form *form = form_of(verify);
    const int64_t row_bytes = form->dim * cpa_dtype_bytes(form->dtype);
    const char *scales = piece->index + piece->tokens * row_bytes;
    float row[CPA_INDEX_MOST_DIM];
    memset(keys, 0, sizeof *keys);
    for (int64_t t = 0; t < n; t++) {
        widen(piece->index + (first + t) * row_bytes, form->dtype, form->dim, row);
        for (int32_t d = 0; d < form->dim; d++) keys->elements[d][t] = row[d];
        keys->scales[t] = 1;
        if (cpa_dtype_is_quantised(form->dtype))
            memcpy(&keys->scales[t], scales + (first + t) * (int64_t)sizeof(float), sizeof(float));
    }
}

void cpa_verify_choice_begin(cpa_verify_choice *choice) {
    *choice = (cpa_verify_choice){.listed = {.key = -1}, .others = {.key = -1}};
}

/* ---- scores ---- */

/* Scores of LANES keys, their errors, and the sums of the sizes of all terms, without the scales of the keys. */
typedef struct lane_sums {
    double score[LANES], slack[LANES], size[LANES];
} lane_sums;

/* What is known of the arithmetic: error of a sum over dim and of one over heads, relative to their terms, and what each
 * product of tensor cores loses of its largest addend. */
typedef struct arithmetic {
    double dim, heads, lost;
} arithmetic;

static arithmetic arithmetic_of(const cpa_verify *verify) {
    const cpa_index_form *form = form_of(verify);
    const int is_coarse = form->dtype == CPA_FP8_E4M3 && verify->worker->device->backend != CPA_BACKEND_HOST;
    return (arithmetic){.dim = 4 * 0x1p-24 * sqrt(form->dim),
                        .heads = 4 * 0x1p-24 * (sqrt(form->heads) + 1),
                        .lost = is_coarse ? (TENSOR_CORE_TERMS + 1) * 0x1p-13 : 0};
}

/* Adds a head to LANES keys from `first` on. */
CPA_VECTOR_LOOPS static void add_head(const float *q, double weight, const cpa_verify_index_keys *keys, int64_t first,
                                      int32_t dim, const arithmetic *a, lane_sums *sums) {
    double product[LANES] = {0}, size[LANES] = {0}, lost[LANES] = {0};
    for (int32_t begin = 0; begin < dim; begin += TENSOR_CORE_TERMS) {
        const int32_t end = dim - begin < TENSOR_CORE_TERMS ? dim : begin + TENSOR_CORE_TERMS;
        double largest[LANES];
        for (int l = 0; l < LANES; l++) largest[l] = fabs(product[l]);
        for (int32_t d = begin; d < end; d++) {
            for (int l = 0; l < LANES; l++) {
                const double term = (double)q[d] * (double)keys->elements[d][first + l], absolute = fabs(term);
                product[l] += term;
                size[l] += absolute;
                largest[l] = absolute > largest[l] ? absolute : largest[l];
            }
        }
        for (int l = 0; l < LANES; l++) lost[l] += largest[l];
    }
    for (int l = 0; l < LANES; l++) {
        const double error = a->dim * size[l] + a->lost * lost[l], kept = product[l] > 0 ? product[l] : 0;
        sums->size[l] += fabs(weight) * size[l];
        sums->score[l] += weight * kept;
        sums->slack[l] += product[l] > -error ? fabs(weight) * (error + a->heads * kept) : 0;
    }
}

/* The scores of LANES keys from `first` on. */
static void score_keys(const cpa_verify_chooser *row, const cpa_verify_index_keys *keys, int64_t first,
                       const arithmetic *a, lane_sums *sums) {
    const cpa_index_form *form = form_of(row->verify);
    const int64_t head_bytes = form->dim * cpa_dtype_bytes(form->dtype);
    const char *q = (const char *)row->list + row->verify->list_bytes, *weights = q + form->heads * head_bytes;
    memset(sums, 0, sizeof *sums);
    for (int32_t head = 0; head < form->heads; head++) {
        float wide[CPA_INDEX_MOST_DIM], weight = 1;
        widen(q + head * head_bytes, form->dtype, form->dim, wide);
        if (form->has_weights) memcpy(&weight, weights + head * (int64_t)sizeof weight, sizeof weight);
        add_head(wide, (double)weight, keys, first, form->dim, a, sums);
    }
    for (int l = 0; l < LANES; l++) {
        const double scale = (double)keys->scales[first + l];
        sums->score[l] *= scale;
        sums->slack[l] *= fabs(scale);
        sums->size[l] *= fabs(scale) <= 1 ? 1 : fabs(scale);
    }
}

/* ---- the choice ---- */

/* How good a key is at least, and at most. */
static double least(const cpa_verify_scored *key) {
    return key->score - key->slack;
}
static double most(const cpa_verify_scored *key) {
    return key->score + key->slack;
}

static void note_listed(cpa_verify_choice *choice, const cpa_verify_scored *key) {
    const cpa_verify_scored *known = &choice->listed;
    if (key->key < 0) return;
    if (known->key < 0 || most(key) < most(known) || (most(key) == most(known) && key->key > known->key))
        choice->listed = *key;
}

static void note_other(cpa_verify_choice *choice, const cpa_verify_scored *key) {
    const cpa_verify_scored *known = &choice->others;
    if (key->key < 0) return;
    if (known->key < 0 || least(key) > least(known) || (least(key) == least(known) && key->key < known->key))
        choice->others = *key;
}

static int is_forced(const cpa_verify_chooser *row, int64_t key) {
    const cpa_index_form *form = form_of(row->verify);
    return key < form->forced_first || key > row->position - form->forced_last;
}

void cpa_verify_choice_add(cpa_verify_choice *choice, const cpa_verify_chooser *row, const cpa_verify_index_keys *keys,
                           int64_t n, const int64_t *positions) {
    const arithmetic a = arithmetic_of(row->verify);
    lane_sums sums;
    for (int64_t t = 0; t < n; t++) {
        const int lane = (int)(t % LANES);
        if (lane == 0) score_keys(row, keys, t, &a, &sums);
        if (positions[t] > row->position) continue;
        const int is_listed = cpa_verify_selects(row->list, positions[t]);
        cpa_verify_scored key = {positions[t], sums.score[lane], sums.slack[lane]};
        if (is_forced(row, key.key)) {
            if (is_listed) continue;
            key = (cpa_verify_scored){key.key, INFINITY, 0};
        } else if (!(sums.size[lane] <= (double)FLT_MAX / 4)) {
            choice->undecided = 1;
            continue;
        }
        if (is_listed)
            note_listed(choice, &key);
        else
            note_other(choice, &key);
    }
}

void cpa_verify_choice_join(cpa_verify_choice *choice, const cpa_verify_choice *other) {
    choice->undecided |= other->undecided;
    note_listed(choice, &other->listed);
    note_other(choice, &other->others);
}

/* Whether the list has as many keys as there are to choose, each once, in order. */
static int is_a_list(const cpa_verify_chooser *row, char *says, size_t bytes) {
    const cpa_verify_list *list = row->list;
    const int32_t *entries = cpa_verify_entries(list), k = form_of(row->verify)->k;
    const int64_t expected = row->position + 1 < k ? row->position + 1 : k;
    if (list->count != expected || list->count > list->width) {
        snprintf(says, bytes, "a list of %d keys, expected %lld", list->count, (long long)expected);
        return 0;
    }
    for (int32_t i = 0; i < list->count; i++) {
        if (entries[i] > (i > 0 ? entries[i - 1] : -1) && entries[i] <= row->position) continue;
        snprintf(says, bytes, "entry %d of the list is key %d, behind key %d, expected ascending keys of 0 to %lld", i,
                 entries[i], i > 0 ? entries[i - 1] : -1, (long long)row->position);
        return 0;
    }
    return 1;
}

int cpa_verify_choice_judge(const cpa_verify_choice *choice, const cpa_verify_chooser *row, char *says, size_t bytes) {
    const cpa_verify_scored *listed = &choice->listed, *other = &choice->others;
    if (choice->undecided) return 1;
    if (!is_a_list(row, says, bytes)) return 0;
    if (listed->key < 0 || other->key < 0) return 1;
    const int is_tie = listed->slack == 0 && other->slack == 0 && least(other) == most(listed);
    if (!(least(other) > most(listed)) && !(is_tie && other->key < listed->key)) return 1;
    snprintf(says, bytes,
             "key %lld is on the list, with the index score %.9g, but not key %lld with %.9g (allowed %.3g)",
             (long long)listed->key, listed->score, (long long)other->key, other->score, listed->slack + other->slack);
    return 0;
}
