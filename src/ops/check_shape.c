#include "src/ops/check_shape.h"

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

cpa_status cpa_check_shape(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s), "%s: the reserved bytes of the shape are not zero", where);
    CPA_TRY(cpa_check_heads(where, s->q_heads, s->kv_heads, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    return cpa_check_cache_shape(where, s, err);
}

cpa_status cpa_check_attend(const char *where, const cpa_device *device, const cpa_attention_shape *shape,
                            const cpa_mask *mask, cpa_error *err) {
    CPA_TRY(cpa_check_shape(where, shape, err));
    if (mask) CPA_TRY(cpa_check_mask(where, mask, err));
    return device->operators->attend_supported(device, where, shape, mask, err);
}
