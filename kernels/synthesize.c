/* synthesize: queries, keys and values from a counter-based generator, peaky as those of real models.
 *
 * Integer arithmetic, and fp32 +, *, / and sqrt in the order written, each rounded once; compiled without contraction.
 * Every back end gives the same bits.
 *
 *     mix(x)        cpa_mix64
 *     chain(h, x)   mix((h ^ x) + CPA_GOLDEN)
 *     head_key      chain(chain(chain(seed, tensor), layer), head)
 *     row_key       chain(chain(head_key, token), position)
 *     noise(e)      with h = mix(row_key + (e/4 + 1) * CPA_GOLDEN) and its bytes b: (b[2j] + b[2j+1] - 255) *
 *                   NOISE_UNIT for j = e mod 4; triangular, of variance 1
 *     sign(t, e)    -1 or +1: bit e mod 64 of mix(chain(chain(chain(seed, t), layer), kv_head) + e/64)
 *     wave(x, T)    triangle wave of period T: (|4 (x mod T) - 2T| - T) / T
 *
 * A row of width d begins with 2P = 2 * min(4, d/8) wave elements; r = d - 2P elements follow.
 *     queries and keys, e < 2P: local * wave(position + (T/4 if e is odd), T), T = PERIODS[e/2]
 *     queries, else:            noise + sink * sign(SINK, e) [+ far * sign(FAR, e) if hash(token, position) mod 4 = 0]
 *     keys, else:               noise [+ sink * sign(SINK, e) if position < 4] [+ far * sign(FAR, e) if token is heavy]
 *     values:                   noise [+ 2 * sign(VALUE, e) if token is heavy]
 * A token is heavy if hash(token) mod 64 = 0. With the amplitudes
 *     sink  = sqrt(SINK_SCORE * sqrt(d) / r)
 *     far   = sqrt(FAR_SCORE * sqrt(d) / r)
 *     local = sqrt(LOCAL_SCORE * sqrt(d) / P)
 * the scaled scores q.k / sqrt(d) rise by SINK_SCORE at the first keys, by FAR_SCORE at heavy keys for one query in
 * four, and by about LOCAL_SCORE * 2/3 near the query, falling off over some 64 positions.
 */
#include "kernels/synthesize.h"

#include <math.h>

#include "base/convert.h"
#include "base/hash.h"

enum { WAVE_PAIRS = 4, HEAVY_ONE_IN = 64, LOOKING_ONE_IN = 4, SINK_KEYS = 4 };
enum { DIRECTION_SINK = 16, DIRECTION_FAR, DIRECTION_VALUE, HASH_HEAVY, HASH_LOOKING };

static const uint32_t PERIODS[WAVE_PAIRS] = {256, 320, 448, 704};
static const float SINK_SCORE = 6, FAR_SCORE = 7, LOCAL_SCORE = 9, VALUE_OFFSET = 2;
static const float NOISE_UNIT = 0x1.39897ep-7f; /* 1 / sqrt(2 (256^2 - 1) / 12) */

static uint64_t chain(uint64_t h, uint64_t x) {
    return cpa_mix64((h ^ x) + CPA_GOLDEN);
}

static uint64_t head_key(const cpa_synth_args *args, uint64_t tag, int32_t head) {
    return chain(chain(chain(args->seed, tag), (uint64_t)args->layer), (uint64_t)head);
}

static void fill_noise(float *row, uint64_t row_key, int32_t dim) {
    for (int32_t e = 0; e < dim; e += 4) {
        uint64_t h = cpa_mix64(row_key + (uint64_t)(e / 4 + 1) * CPA_GOLDEN);
        for (int32_t j = 0; j < 4; j++) {
            int32_t pair = (int32_t)(h >> (16 * j) & 255) + (int32_t)(h >> (16 * j + 8) & 255);
            row[e + j] = (float)(pair - 255) * NOISE_UNIT;
        }
    }
}

/* direction[e] = amplitude * sign(tag, e). */
static void fill_direction(float *direction, const cpa_synth_args *args, uint64_t tag, int32_t kv_head,
                           float amplitude) {
    uint64_t key = head_key(args, tag, kv_head);
    for (int32_t e = 0; e < args->dim; e++)
        direction[e] = cpa_mix64(key + (uint64_t)(e / 64)) >> (e % 64) & 1 ? amplitude : -amplitude;
}

static void add_direction(float *row, const float *direction, int32_t begin, int32_t end) {
    for (int32_t e = begin; e < end; e++) row[e] += direction[e];
}

static float wave(uint64_t x, uint32_t period) {
    int64_t t = (int64_t)period, slope = 4 * (int64_t)(x % period) - 2 * t;
    return (float)((slope < 0 ? -slope : slope) - t) / (float)t;
}

/* What the rows of one head share. */
typedef struct head_pattern {
    const cpa_synth_args *args;
    uint64_t key;
    int32_t waves; /* leading elements that carry the position */
    float local;
    float sink[CPA_MAX_HEAD_DIM], far[CPA_MAX_HEAD_DIM], value[CPA_MAX_HEAD_DIM];
} head_pattern;

static void begin_head(head_pattern *pattern, const cpa_synth_args *args, int32_t head) {
    int32_t pairs = args->dim / 8 < WAVE_PAIRS ? args->dim / 8 : WAVE_PAIRS;
    int32_t kv_head = head / (args->heads / args->kv_heads);
    float root = sqrtf((float)args->dim), rest = (float)(args->dim - 2 * pairs);
    pattern->args = args;
    pattern->key = head_key(args, args->tensor, head);
    pattern->waves = 2 * pairs;
    pattern->local = pairs ? sqrtf(LOCAL_SCORE * root / (float)pairs) : 0;
    if (args->tensor == CPA_SYNTH_V) {
        fill_direction(pattern->value, args, DIRECTION_VALUE, kv_head, VALUE_OFFSET);
    } else {
        fill_direction(pattern->sink, args, DIRECTION_SINK, kv_head, sqrtf(SINK_SCORE * root / rest));
        fill_direction(pattern->far, args, DIRECTION_FAR, kv_head, sqrtf(FAR_SCORE * root / rest));
    }
}

static void fill_row(float *row, const head_pattern *pattern, uint64_t token, uint64_t position) {
    const cpa_synth_args *args = pattern->args;
    int heavy = chain(HASH_HEAVY, token) % HEAVY_ONE_IN == 0;
    int looking = chain(chain(HASH_LOOKING, token), position) % LOOKING_ONE_IN == 0;
    fill_noise(row, chain(chain(pattern->key, token), position), args->dim);
    if (args->tensor == CPA_SYNTH_V) {
        if (heavy) add_direction(row, pattern->value, 0, args->dim);
        return;
    }
    for (int32_t e = 0; e < pattern->waves; e++) {
        uint32_t period = PERIODS[e / 2];
        row[e] = pattern->local * wave(position + (e & 1) * (period / 4), period);
    }
    int is_query = args->tensor == CPA_SYNTH_Q;
    if (is_query || position < SINK_KEYS) add_direction(row, pattern->sink, pattern->waves, args->dim);
    if (is_query ? looking : heavy) add_direction(row, pattern->far, pattern->waves, args->dim);
}

void cpa_synthesize_rows(const cpa_synth_args *args, int32_t head, int64_t begin, int64_t end, void *out,
                         int64_t row_stride) {
    const int64_t bytes = row_stride * cpa_dtype_bytes(args->dtype);
    head_pattern pattern;
    float row[CPA_MAX_HEAD_DIM];
    begin_head(&pattern, args, head);
    for (int64_t i = begin; i < end; i++) {
        fill_row(row, &pattern, args->tokens[i], (uint64_t)args->positions[i]);
        cpa_narrow((char *)out + (i - begin) * bytes, row, args->dtype, args->dim);
    }
}
