#include "kernels/block_layout.h"

#include "kernels/kv_view.h"

static int64_t aligned(int64_t bytes) {
    return (bytes + CPA_SECTION_ALIGNMENT - 1) / CPA_SECTION_ALIGNMENT * CPA_SECTION_ALIGNMENT;
}

static void add_section(cpa_block_layout *layout, cpa_section_kind kind, cpa_kv_part part) {
    const cpa_attention_shape *shape = &layout->shape;
    const int32_t width = part == CPA_KEYS ? shape->k_dim : shape->v_dim;
    const float tensor_scale = cpa_shape_tensor_scale(shape, part);
    cpa_block_section *section = &layout->sections[layout->n_sections++];
    *section = (cpa_block_section){
        .kind = kind,
        .heads = shape->kv_heads,
        .width = width,
        .row = cpa_dtype_traits_of(shape->kv_dtype)->rows[part],
        .row_bytes = cpa_shape_row_bytes(shape, part),
        .scale_bytes = cpa_kv_scale_bytes(shape->kv_dtype, part, tensor_scale),
        .scales_at = cpa_kv_scales_at(shape->kv_dtype, part, tensor_scale, layout->block_size, shape->kv_heads, width),
        .at = layout->bytes,
        .bytes = cpa_shape_block_bytes(shape, part, layout->block_size),
    };
    layout->bytes += aligned(section->bytes);
}

cpa_block_layout cpa_block_layout_of(const cpa_attention_shape *shape, int32_t block_size) {
    cpa_block_layout layout = {.shape = *shape, .block_size = block_size};
    add_section(&layout, shape->v_in_k ? CPA_SECTION_LATENTS : CPA_SECTION_KEYS, CPA_KEYS);
    if (!shape->v_in_k) add_section(&layout, CPA_SECTION_VALUES, CPA_VALUES);
    return layout;
}

const cpa_block_section *cpa_block_section_of(const cpa_block_layout *layout, cpa_section_kind kind) {
    for (int32_t i = 0; i < layout->n_sections; i++)
        if (layout->sections[i].kind == kind) return &layout->sections[i];
    return NULL;
}

cpa_kv_view cpa_block_layout_view(const cpa_block_layout *layout, void *memory, int64_t num_blocks, int64_t stride) {
    cpa_kv_view kv = cpa_kv_view_of(&layout->shape, layout->block_size, num_blocks);
    const cpa_block_section *values = cpa_block_section_of(layout, CPA_SECTION_VALUES);
    kv.k = memory;
    kv.v = values ? (char *)memory + values->at : kv.k;
    kv.k_block_stride = kv.v_block_stride = (stride ? stride : layout->bytes) / cpa_dtype_bytes(kv.dtype);
    return kv;
}

/* The memory of a view may end with the last row of its last block: a layout that is filled up behind that matches
 * none. */
int cpa_block_layout_matches(const cpa_block_layout *layout, const cpa_kv_view *kv) {
    const cpa_block_section *last = &layout->sections[layout->n_sections - 1];
    const cpa_kv_view given = cpa_kv_view_resolve(*kv);
    const int64_t stride = given.k_block_stride * cpa_dtype_bytes(given.dtype);
    const cpa_kv_view own = cpa_block_layout_view(layout, given.k, given.num_blocks, stride);
    return stride >= layout->bytes && (stride | (int64_t)(uintptr_t)given.k) % CPA_SECTION_ALIGNMENT == 0 &&
           last->at + last->bytes == layout->bytes && given.v == own.v && given.block_size == own.block_size &&
           cpa_kv_same_form(&given, &own) && given.kv_heads == own.kv_heads && given.k_dim == own.k_dim &&
           given.v_dim == own.v_dim && given.v_in_k == own.v_in_k && given.v_block_stride == own.v_block_stride &&
           given.k_token_stride == own.k_token_stride && given.k_head_stride == own.k_head_stride &&
           given.v_token_stride == own.v_token_stride && given.v_head_stride == own.v_head_stride;
}
