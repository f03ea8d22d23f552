#include "src/context/narrow_states.h"

/* Where the LSE of a row lies. */
static int64_t lse_at(const cpa_context_ops *ops, const cpa_form *form) {
    const int64_t word = sizeof(float);
    const int64_t bytes = (int64_t)form->shape.q_heads * form->out_dim * cpa_dtype_bytes(ops->options.state_dtype);
    return (bytes + word - 1) / word * word;
}

int64_t cpa_narrow_row_bytes(const cpa_context_ops *ops, const cpa_form *form) {
    const int64_t unit = 16, bytes = lse_at(ops, form) + form->shape.q_heads * (int64_t)sizeof(float);
    return (bytes + unit - 1) / unit * unit;
}

/* Rows of a message as states, whose O has another dtype. */
static cpa_partial rows_at(const cpa_context_ops *ops, const cpa_form *form, void *memory) {
    const int64_t bytes = cpa_narrow_row_bytes(ops, form);
    return (cpa_partial){.o = memory,
                         .o_row_stride = bytes / cpa_dtype_bytes(ops->options.state_dtype),
                         .lse = (float *)(void *)((char *)memory + lse_at(ops, form)),
                         .lse_row_stride = bytes / (int64_t)sizeof(float)};
}

/* A merge of one state changes no more than its dtype. */
static cpa_status convert(cpa_context_ops *ops, const cpa_form *form, cpa_partial from, cpa_dtype from_dtype,
                          cpa_partial to, cpa_dtype to_dtype, int64_t rows, cpa_stream *stream) {
    const cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = rows,
        .heads = form->shape.q_heads,
        .v_dim = form->out_dim,
        .states = &from,
        .n_states = 1,
        .state_dtype = from_dtype,
        .out_dtype = to_dtype,
        .out = to.o,
        .out_row_stride = to.o_row_stride,
        .out_lse = to.lse,
        .out_lse_row_stride = to.lse_row_stride,
    };
    return cpa_context_run_merge(ops, &merge, NULL, stream);
}

cpa_status cpa_narrow_states(cpa_context_ops *ops, const cpa_form *form, cpa_partial from, int64_t rows, void *to,
                             cpa_stream *stream) {
    return convert(ops, form, from, CPA_F32, rows_at(ops, form, to), ops->options.state_dtype, rows, stream);
}

cpa_status cpa_widen_states(cpa_context_ops *ops, const cpa_form *form, void *from, int64_t rows, cpa_partial to,
                            cpa_stream *stream) {
    return convert(ops, form, rows_at(ops, form, from), ops->options.state_dtype, to, CPA_F32, rows, stream);
}
