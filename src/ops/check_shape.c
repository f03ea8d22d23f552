#include "src/ops/check_shape.h"

#include "base/struct_size.h"
#include "src/ops/check_args.h"

cpa_status cpa_check_shape(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s), "%s: the reserved bytes of the shape are not zero", where);
    REQUIRE(err, s->v_in_k == 0 || s->v_in_k == 1, "%s: v_in_k is %d, expected 0 or 1", where, s->v_in_k);
    if (s->v_in_k) {
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "%s: v_in_k is 1: values that are the first %d elements of their keys of %d are not supported",
                        where, s->v_dim, s->k_dim);
    }
    CPA_TRY(cpa_check_heads(where, s->q_heads, s->kv_heads, err));
    CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", s->v_dim, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    REQUIRE(err, cpa_dtype_traits_of(s->kv_dtype), "%s: kv_dtype is %d, which is none", where, (int)s->kv_dtype);
    REQUIRE(err, s->layout == CPA_TOKEN_MAJOR || s->layout == CPA_HEAD_MAJOR, "%s: layout is %d, expected 0 or 1",
            where, (int)s->layout);
    return cpa_check_scales(where, s->kv_dtype, s->k_scale, s->v_scale, err);
}
