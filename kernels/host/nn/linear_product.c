#include "kernels/host/nn/linear_product.h"

#include "base/convert.h"
#include "base/min_max.h"

cpa_linear_multiply *cpa_linear_pick(const cpa_host_device *device) {
#ifdef __x86_64__
#ifndef CPA_WITHOUT_AVX512
    if (device->isa == &cpa_attend_avx512) return cpa_linear_avx512;
#endif
    if (device->isa == &cpa_attend_avx2) return cpa_linear_avx2;
#endif
    (void)device;
    return cpa_linear_portable;
}

/* Bytes of a weight. */
static int64_t weight_bytes(const cpa_linear_product *p) {
    return p->scales ? 1 : cpa_dtype_bytes(p->dtype);
}

cpa_linear_product cpa_linear_product_of_expert(const cpa_linear_product *first, int32_t expert) {
    cpa_linear_product p = *first;
    p.weight = (const char *)p.weight + expert * p.expert_stride * weight_bytes(&p);
    if (p.scales) p.scales += expert * p.scale_rows * p.scale_columns;
    return p;
}

/* The scales of outputs from `first` on, a multiple of CPA_SCALE_BLOCK: one for each, or one row for all. */
static void set_scales(const cpa_linear_product *p, int64_t first, cpa_linear_tile *tile) {
    const int each = p->scale_rows == p->outputs && p->scale_columns == 1;
    tile->scales = p->scales + (each ? first : first / CPA_SCALE_BLOCK * p->scale_columns);
    tile->scale_stride = each;
    tile->scale_inputs = each ? p->inputs : CPA_SCALE_BLOCK;
}

/* A row's results from its lane of the tile: bias, rounding. */
static void store_row(const cpa_linear_product *p, const cpa_linear_tile *tile, int lane, int64_t first, char *out) {
    float sums[CPA_LINEAR_OUTPUTS], bias[CPA_LINEAR_OUTPUTS] = {0};
    if (p->bias) cpa_widen(bias, (const char *)p->bias + first * cpa_dtype_bytes(p->dtype), p->dtype, tile->outputs);
    for (int64_t o = 0; o < tile->outputs; o++) sums[o] = tile->sums[o * CPA_LINEAR_ROWS + lane] + bias[o];
    cpa_narrow(out, sums, p->out_dtype, tile->outputs);
}

void cpa_linear_multiply_panel(const cpa_linear_product *p, int64_t panel, const char *const *x, char *const *out,
                               int rows) {
    _Static_assert((int)CPA_LINEAR_OUTPUTS == (int)CPA_SCALE_BLOCK, "a panel has one row of scales");
    const int64_t first = panel * CPA_LINEAR_OUTPUTS;
    float sums[CPA_LINEAR_OUTPUTS * CPA_LINEAR_ROWS];
    cpa_linear_tile tile = {
        .dtype = p->dtype,
        .inputs = p->inputs,
        .rows = rows,
        .weight = (const char *)p->weight + first * p->weight_stride * weight_bytes(p),
        .weight_stride = p->weight_stride * weight_bytes(p),
        .outputs = cpa_min64(CPA_LINEAR_OUTPUTS, p->outputs - first),
        .sums = sums,
    };
    if (p->scales) set_scales(p, first, &tile);
    for (int i = 0; i < CPA_LINEAR_ROWS; i++) tile.x[i] = x[i < rows ? i : rows - 1];
    p->multiply(&tile);
    for (int lane = 0; lane < rows; lane++) store_row(p, &tile, lane, first, out[lane]);
}
