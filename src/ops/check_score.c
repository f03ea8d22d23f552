#include "src/ops/check_score.h"

#include <math.h>

#include "base/struct_size.h"
#include "src/ops/check_args.h"
#include "src/ops/check_selection.h"

static cpa_status check_rules(const char *where, const cpa_score_rules *rules, cpa_error *err) {
    const float softcap = rules->softcap, len = rules->temperature_len;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*rules), "%s: the reserved bytes of the score rules are not zero", where);
    REQUIRE(err, softcap >= 0 && isfinite(softcap), "%s: softcap is %g, expected 0 or a finite number above it", where,
            (double)softcap);
    REQUIRE(err, len == 0 || (len > 1 && isfinite(len)),
            "%s: temperature_len is %g, expected 0 or a finite number above 1", where, (double)len);
    CPA_TRY(cpa_check_aligned(where, "alibi_slopes", rules->alibi_slopes, sizeof(float), err));
    return cpa_check_aligned(where, "sink_logits", rules->sink_logits, sizeof(float), err);
}

static cpa_status check_bias(const char *where, const cpa_score_bias *bias, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*bias), "%s: the reserved bytes of the bias are not zero", where);
    CPA_TRY(cpa_check_dtype(where, "dtype of the bias", bias->dtype, err));
    REQUIRE(err,
            bias->first >= 0 && bias->width >= 0 && bias->first <= CPA_MOST_TOKENS && bias->width <= CPA_MOST_TOKENS,
            "%s: the bias has keys [%lld, +%lld), expected 0 to 2^44 for both", where, (long long)bias->first,
            (long long)bias->width);
    REQUIRE(err, bias->values || bias->width == 0, "%s: the values of the bias are NULL for %lld keys", where,
            (long long)bias->width);
    const int64_t most = CPA_MOST_BYTES / (int64_t)sizeof(float);
    REQUIRE(err,
            bias->row_stride >= 0 && bias->head_stride >= 0 && bias->row_stride <= most && bias->head_stride <= most,
            "%s: the bias has row_stride %lld and head_stride %lld, expected 0 to 2^58", where,
            (long long)bias->row_stride, (long long)bias->head_stride);
    CPA_TRY(cpa_check_aligned(where, "values of the bias", bias->values, cpa_dtype_bytes(bias->dtype), err));
    return cpa_check_aligned(where, "row_map of the bias", bias->row_map, sizeof(int32_t), err);
}

cpa_status cpa_check_score(const char *where, const cpa_score_rules *rules, const cpa_key_selection *selection,
                           const cpa_score_bias *bias, cpa_error *err) {
    if (rules) CPA_TRY(check_rules(where, rules, err));
    if (selection) CPA_TRY(cpa_check_selection(where, selection, err));
    return bias ? check_bias(where, bias, err) : CPA_OK;
}

cpa_status cpa_check_score_reach(const char *where, const cpa_device *device, int64_t end, const cpa_score_rules *rules,
                                 const cpa_key_selection *selection, const cpa_score_bias *bias, cpa_error *err) {
    const int64_t most = (int64_t)1 << 30;
    const int has_slopes = rules && rules->alibi_slopes;
    if (!device->caps.own_memory || end <= most || (!has_slopes && !selection && !bias)) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "%s: %s over %lld tokens, expected at most 2^30 on this device", where,
                    has_slopes  ? "alibi_slopes"
                    : selection ? "a selection"
                                : "a bias",
                    (long long)end);
}
