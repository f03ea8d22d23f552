#include "src/ops/check_shape.h"

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

/* Keys that hold their values are latent: wider than heads are otherwise. */
enum { MOST_LATENT_DIM = 1 << 12 };

static cpa_status check_widths(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    if (!s->v_in_k) {
        CPA_TRY(cpa_check_dim(where, "k_dim", s->k_dim, err));
        return cpa_check_dim(where, "v_dim", s->v_dim, err);
    }
    REQUIRE(err, s->v_dim >= 1 && s->v_dim <= s->k_dim && s->k_dim <= MOST_LATENT_DIM,
            "%s: v_in_k is 1, v_dim is %d and k_dim is %d; expected values within keys of at most %d", where, s->v_dim,
            s->k_dim, MOST_LATENT_DIM);
    return CPA_OK;
}

cpa_status cpa_check_shape(const char *where, const cpa_attention_shape *s, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s), "%s: the reserved bytes of the shape are not zero", where);
    REQUIRE(err, s->v_in_k == 0 || s->v_in_k == 1, "%s: v_in_k is %d, expected 0 or 1", where, s->v_in_k);
    CPA_TRY(cpa_check_heads(where, s->q_heads, s->kv_heads, err));
    CPA_TRY(check_widths(where, s, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", s->dtype, err));
    REQUIRE(err, cpa_dtype_traits_of(s->kv_dtype), "%s: kv_dtype is %d, which is none", where, (int)s->kv_dtype);
    CPA_TRY(cpa_check_layout(where, s->layout, s->kv_dtype, s->k_dim, err));
    CPA_TRY(
        cpa_check_head_scales(where, s->kv_dtype, s->kv_heads, s->k_scale, s->k_scales, s->v_scales, s->n_scales, err));
    return cpa_check_scales(where, s->kv_dtype, s->k_scale, s->v_scale, err);
}

cpa_status cpa_check_attend(const char *where, const cpa_device *device, const cpa_attention_shape *shape,
                            const cpa_mask *mask, cpa_error *err) {
    CPA_TRY(cpa_check_shape(where, shape, err));
    if (mask) CPA_TRY(cpa_check_mask(where, mask, err));
    return device->operators->attend_supported(device, where, shape, mask, err);
}
