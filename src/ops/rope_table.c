/* The table of rotary positions, in float64 on the host. */
#include <math.h>

#include <cpattn/nn.h>

#include "base/struct_size.h"
#include "src/ops/check_args.h"

static const double TWO_PI = 6.283185307179586;

static cpa_status check_config(const cpa_rope_config *c, cpa_error *err) {
    const char *where = "rope table";
    REQUIRE(err, (uint32_t)c->scaling < CPA_ROPE_SCALING_COUNT, "%s: scaling is %d, which is none", where,
            (int)c->scaling);
    REQUIRE(err, c->dim >= 2 && c->dim % 2 == 0 && c->dim <= CPA_MAX_HEAD_DIM,
            "%s: dim is %d, expected an even number, 2..%d", where, c->dim, CPA_MAX_HEAD_DIM);
    REQUIRE(err, c->theta > 1 && isfinite(c->theta), "%s: theta is %g, expected a number above 1", where, c->theta);
    REQUIRE(err, c->max_position >= 1 && c->max_position <= CPA_MOST_TOKENS,
            "%s: max_position is %lld, expected 1 to 2^44", where, (long long)c->max_position);
    REQUIRE(err, c->scaling == CPA_ROPE_PLAIN || (c->factor >= 1 && isfinite(c->factor)),
            "%s: factor is %g, expected a number of at least 1", where, c->factor);
    const int original = c->scaling == CPA_ROPE_LLAMA3 || c->scaling == CPA_ROPE_YARN;
    REQUIRE(err, !original || c->original_max_position >= 1, "%s: original_max_position is %lld, expected at least 1",
            where, (long long)c->original_max_position);
    REQUIRE(err,
            c->scaling != CPA_ROPE_LLAMA3 ||
                (c->low_freq_factor > 0 && c->high_freq_factor > c->low_freq_factor && isfinite(c->high_freq_factor)),
            "%s: low_freq_factor is %g and high_freq_factor is %g, expected numbers above 0, the second larger", where,
            c->low_freq_factor, c->high_freq_factor);
    REQUIRE(err,
            c->scaling != CPA_ROPE_YARN || (c->beta_fast >= 0 && c->beta_slow >= 0 && c->attention_factor >= 0 &&
                                            isfinite(c->beta_fast + c->beta_slow + c->attention_factor)),
            "%s: beta_fast is %g, beta_slow is %g and attention_factor is %g, expected numbers of at least 0", where,
            c->beta_fast, c->beta_slow, c->attention_factor);
    REQUIRE(err,
            c->scaling != CPA_ROPE_YARN ||
                (c->mscale >= 0 && c->mscale_all_dim >= 0 && isfinite(c->mscale + c->mscale_all_dim)),
            "%s: mscale is %g and mscale_all_dim is %g, expected numbers of at least 0", where, c->mscale,
            c->mscale_all_dim);
    return CPA_OK;
}

static double llama3_frequency(const cpa_rope_config *c, double f) {
    const double wave_length = TWO_PI / f, original = (double)c->original_max_position;
    if (wave_length < original / c->high_freq_factor) return f;
    if (wave_length > original / c->low_freq_factor) return f / c->factor;
    const double s = (original / wave_length - c->low_freq_factor) / (c->high_freq_factor - c->low_freq_factor);
    return (1 - s) * f / c->factor + s * f;
}

/* The index of the frequency that turns `turns` times within the original positions. */
static double yarn_index(const cpa_rope_config *c, double turns) {
    return c->dim * log((double)c->original_max_position / (TWO_PI * turns)) / (2 * log(c->theta));
}

static double yarn_frequency(const cpa_rope_config *c, int32_t i, double f) {
    const double fast = c->beta_fast > 0 ? c->beta_fast : 32, slow = c->beta_slow > 0 ? c->beta_slow : 1;
    const double low = fmax(floor(yarn_index(c, fast)), 0);
    double high = fmin(ceil(yarn_index(c, slow)), c->dim - 1);
    if (high == low) high += 0.001;
    const double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
    return f * (1 - ramp) + f / c->factor * ramp;
}

/* What YaRN multiplies cosines and sines by. */
static double yarn_size(const cpa_rope_config *c) {
    if (c->attention_factor > 0) return c->attention_factor;
    const double mscale = c->mscale > 0 ? c->mscale : 1, grown = 0.1 * log(c->factor);
    return (grown * mscale + 1) / (grown * c->mscale_all_dim + 1);
}

static double frequency(const cpa_rope_config *c, int32_t i) {
    const double f = pow(c->theta, -2.0 * i / c->dim);
    switch (c->scaling) {
        case CPA_ROPE_LINEAR: return f / c->factor;
        case CPA_ROPE_LLAMA3: return llama3_frequency(c, f);
        case CPA_ROPE_YARN: return yarn_frequency(c, i, f);
        default: return f;
    }
}

cpa_status cpa_rope_table(const cpa_rope_config *given, float *table, cpa_error *err) {
    cpa_rope_config c;
    double frequencies[CPA_MAX_HEAD_DIM / 2], size = 1;
    CPA_TRY(CPA_STRUCT_TAKE("rope table", given, cpa_rope_config, max_position, &c, err));
    CPA_TRY(check_config(&c, err));
    REQUIRE(err, table, "rope table: the table is NULL");
    if (c.scaling == CPA_ROPE_YARN) size = yarn_size(&c);
    const int32_t half = c.dim / 2;
    for (int32_t i = 0; i < half; i++) frequencies[i] = frequency(&c, i);
    for (int64_t position = 0; position < c.max_position; position++) {
        float *row = table + position * c.dim;
        for (int32_t i = 0; i < half; i++) {
            row[i] = (float)(size * cos((double)position * frequencies[i]));
            row[half + i] = (float)(size * sin((double)position * frequencies[i]));
        }
    }
    return CPA_OK;
}
