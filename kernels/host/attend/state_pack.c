/* state_pack and state_merge_packed: partial states cut by heads into messages, and the merge of such. */
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/attend/attend_out.h"
#include "kernels/host/attend/attend_score.h"
#include "kernels/host/attend/state.h"
#include "kernels/host/device/host.h"

enum { ROWS_PER_ITEM = 16 };

/* The end of the rows of an item that begins with `row`. */
static int64_t rows_end(int64_t row, int64_t rows) {
    return cpa_min64(row + ROWS_PER_ITEM, rows);
}

/* ---- state_pack ---- */

/* The LSE has no alignment of its own where elements are halves. */
static void pack_head(const cpa_state_pack_args *args, int64_t row, int32_t head, char *to) {
    const int64_t from = args->row_map ? args->row_map[row] : row;
    const int64_t o_bytes = args->v_dim * cpa_dtype_bytes(args->dtype), o_element = cpa_dtype_bytes(args->o_dtype);
    float lse = -INFINITY;
    if (from < 0) {
        memset(to, 0, (size_t)o_bytes);
    } else {
        const int64_t at = from * args->o_row_stride + (int64_t)head * args->v_dim;
        cpa_convert(to, args->dtype, (const char *)args->o + at * o_element, args->o_dtype, args->v_dim);
        lse = args->lse[from * args->lse_row_stride + head];
    }
    memcpy(to + o_bytes, &lse, sizeof lse);
}

static void pack_rows(void *ctx, int64_t item, int32_t thread) {
    const cpa_state_pack_args *args = ctx;
    const int64_t first = item * ROWS_PER_ITEM, end = rows_end(first, args->rows);
    const int64_t head_bytes = cpa_packed_width(args->v_dim, args->dtype) * cpa_dtype_bytes(args->dtype);
    (void)thread;
    for (int32_t slice = 0; slice < args->n_slices; slice++) {
        const int32_t head = (int32_t)cpa_slice_begin(args->heads, args->n_slices, slice);
        const int32_t heads = (int32_t)cpa_slice_begin(args->heads, args->n_slices, slice + 1) - head;
        if (!args->slices[slice]) continue;
        char *to = (char *)args->slices[slice] + first * heads * head_bytes;
        for (int64_t row = first; row < end; row++) {
            for (int32_t h = 0; h < heads; h++, to += head_bytes) pack_head(args, row, head + h, to);
        }
    }
}

cpa_status cpa_host_state_pack(const cpa_state_pack_args *args, cpa_stream *stream) {
    cpa_state_pack_args job = *args;
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, pack_rows, &job);
    return CPA_OK;
}

/* ---- state_merge_packed ---- */

static void merge_head(const cpa_state_merge_packed_args *args, int64_t row, int32_t head) {
    const int64_t element = cpa_dtype_bytes(args->dtype);
    const int64_t at = (row * args->heads + head) * cpa_packed_width(args->v_dim, args->dtype) * element;
    float o[CPA_MAX_HEAD_DIM] = {0}, part_o[CPA_MAX_HEAD_DIM], lse = -INFINITY, part_lse;
    for (int32_t i = 0; i < args->n_parts; i++) {
        const int32_t part = args->order ? args->order[row * args->n_parts + i] : i;
        if (part < 0 || part >= args->n_parts) continue;
        const char *from = (const char *)args->parts[part] + at;
        memcpy(&part_lse, from + args->v_dim * element, sizeof part_lse);
        if (args->foreign_lse && isnan(part_lse)) continue;
        cpa_widen(part_o, from, args->dtype, args->v_dim);
        cpa_state_fold(o, &lse, part_o, part_lse, args->v_dim);
    }
    if (args->sink_logits) {
        const float factor = cpa_attend_sink_factor(lse, args->sink_logits[head]);
        for (int32_t d = 0; d < args->v_dim; d++) o[d] *= factor;
    }
    const int64_t to = row * args->out_row_stride + (int64_t)head * args->v_dim;
    void *out = (char *)args->out + to * cpa_dtype_bytes(args->out_dtype);
    cpa_host_store_row(out, o, args->out_dtype, args->out_scale, args->v_dim);
    if (args->out_lse) args->out_lse[row * args->out_lse_row_stride + head] = lse;
}

static void merge_rows(void *ctx, int64_t item, int32_t thread) {
    const cpa_state_merge_packed_args *args = ctx;
    const int64_t first = item * ROWS_PER_ITEM, end = rows_end(first, args->rows);
    (void)thread;
    for (int64_t row = first; row < end; row++) {
        for (int32_t head = 0; head < args->heads; head++) merge_head(args, row, head);
    }
}

cpa_status cpa_host_state_merge_packed(const cpa_state_merge_packed_args *args, cpa_stream *stream) {
    cpa_state_merge_packed_args job = *args;
    cpa_host_run(stream, (args->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, merge_rows, &job);
    return CPA_OK;
}
