#include "src/check/cases/inputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "kernels/synthesize.h"

cpa_status cpa_case_synthesize(cpa_synth_args args, void *out, cpa_error *err) {
    const int64_t head_bytes = args.dim * cpa_dtype_bytes(args.dtype);
    uint32_t *tokens = malloc((size_t)args.rows * sizeof *tokens + 1);
    if (!tokens) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld tokens", (long long)args.rows);
    for (int64_t i = 0; i < args.rows; i++)
        tokens[i] = (uint32_t)(args.seed * 7919 + (uint64_t)args.positions[i] * 0x9e3779b1u);
    args.tokens = tokens;
    for (int32_t head = 0; head < args.heads; head++)
        cpa_synthesize_rows(&args, head, 0, args.rows, (char *)out + head * head_bytes, (int64_t)args.heads * args.dim);
    free(tokens);
    return CPA_OK;
}

int cpa_case_is_light(int64_t position, double share) {
    const double run = (double)(position / CPA_CASE_LIGHT_RUN);
    return floor((run + 1) * share) > floor(run * share);
}

/* By a power of two, which leaves the digits alone. */
void cpa_case_lighten(void *keys, cpa_dtype dtype, int64_t row, const int64_t *positions, int64_t n, double share) {
    float wide[CPA_MAX_HEAD_DIM];
    for (int64_t i = 0; i < n; i++) {
        if (!cpa_case_is_light(positions[i], share)) continue;
        for (int64_t at = 0; at < row; at += CPA_MAX_HEAD_DIM) {
            const int64_t some = row - at < CPA_MAX_HEAD_DIM ? row - at : CPA_MAX_HEAD_DIM;
            char *from = (char *)keys + (i * row + at) * cpa_dtype_bytes(dtype);
            cpa_widen(wide, from, dtype, some);
            for (int64_t d = 0; d < some; d++) wide[d] *= CPA_CASE_LIGHT;
            cpa_narrow(from, wide, dtype, some);
        }
    }
}

/* One tensor from a position on, rounded to the dtype; NaN before it. */
static cpa_status make_tensor(const cpa_case_sequence *sequence, cpa_synth_args args, int64_t first, cpa_dtype dtype,
                              const int64_t *positions, float **out, cpa_error *err) {
    const int64_t row = (int64_t)args.heads * args.dim, n = sequence->length * row, skipped = first * row;
    void *rounded = malloc((size_t)((n - skipped) * cpa_dtype_bytes(dtype)) + 1);
    *out = malloc((size_t)n * sizeof **out + 1);
    cpa_status status =
        *out && rounded ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld numbers", (long long)n);
    if (status == CPA_OK) {
        memset(*out, 0xff, (size_t)n * sizeof **out);
        args.kv_heads = sequence->kv_heads;
        args.rows = sequence->length - first;
        args.positions = positions + first;
        args.dtype = CPA_F32;
        status = cpa_case_synthesize(args, *out + skipped, err);
    }
    if (status == CPA_OK) {
        cpa_narrow(rounded, *out + skipped, dtype, n - skipped);
        cpa_widen(*out + skipped, rounded, dtype, n - skipped);
    }
    free(rounded);
    return status;
}

cpa_status cpa_case_sequence_make(cpa_case_sequence *s, uint64_t seed, int64_t q_first, cpa_dtype dtype,
                                  cpa_error *err) {
    int64_t *positions = malloc((size_t)s->length * sizeof *positions + 1);
    const cpa_synth_args q = {.tensor = CPA_SYNTH_Q, .seed = seed, .heads = s->q_heads, .dim = s->k_dim};
    const cpa_synth_args k = {.tensor = CPA_SYNTH_K, .seed = seed, .heads = s->kv_heads, .dim = s->k_dim};
    const cpa_synth_args v = {.tensor = CPA_SYNTH_V, .seed = seed, .heads = s->kv_heads, .dim = s->v_dim};
    cpa_status status;
    s->q = s->k = s->v = NULL;
    if (!positions) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld positions", (long long)s->length);
    for (int64_t i = 0; i < s->length; i++) positions[i] = i;
    CPA_TRY_GOTO(make_tensor(s, q, q_first, dtype, positions, &s->q, err), done);
    CPA_TRY_GOTO(make_tensor(s, k, 0, dtype, positions, &s->k, err), done);
    status = s->v_in_k ? CPA_OK : make_tensor(s, v, 0, dtype, positions, &s->v, err);
done:
    free(positions);
    return status;
}

void cpa_case_sequence_release(cpa_case_sequence *sequence) {
    free(sequence->v);
    free(sequence->k);
    free(sequence->q);
    sequence->q = sequence->k = sequence->v = NULL;
}
