#include "src/model/indexer.h"

#include "base/check.h"

/* Of a piece of the room: as aligned as any operator asks for. */
#define ALIGNMENT 256

cpa_indexer cpa_indexer_of(const cpa_model_config *config, cpa_dtype dtype) {
    return (cpa_indexer){
        .config = config, .dtype = dtype, .rope = {.max_position = config->rope.max_position, .dim = config->rope.dim}};
}

int64_t cpa_indexer_place(cpa_indexer *indexer, int64_t rows, void *memory) {
    const cpa_index_form *c = &indexer->config->index;
    const int64_t queries = rows * c->heads * c->dim, bytes = cpa_dtype_bytes(indexer->dtype);
    const struct {
        void **member;
        int64_t bytes;
    } parts[] = {{&indexer->q_product, queries * bytes},
                 {&indexer->k_product, rows * c->dim * bytes},
                 {(void **)&indexer->weight_product, rows * c->heads * (int64_t)sizeof(float)},
                 {&indexer->q, queries * cpa_dtype_bytes(c->dtype)},
                 {(void **)&indexer->weights, rows * c->heads * (int64_t)sizeof(float)}};
    int64_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].member = memory ? (char *)memory + used : NULL;
        used += (parts[i].bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return used;
}

/* out [rows, outputs] = x [rows, inputs] * weight^T. */
static cpa_status multiply(const cpa_indexer *d, int64_t rows, const void *x, int64_t x_stride, int32_t inputs,
                           const void *weight, int32_t outputs, cpa_dtype out_dtype, void *out, cpa_stream *stream) {
    const cpa_linear_args args = {.size = sizeof args,
                                  .rows = rows,
                                  .inputs = inputs,
                                  .outputs = outputs,
                                  .dtype = d->dtype,
                                  .out_dtype = out_dtype,
                                  .x = x,
                                  .x_stride = x_stride,
                                  .weight = weight,
                                  .out = out};
    return cpa_linear(&args, stream);
}

/* Codes keep more of what is spread over all elements; elements of bf16 lose nothing to it either way. */
static int is_spread(const cpa_indexer *d) {
    return d->config->index.dtype == CPA_FP8_E4M3;
}

static cpa_status write_keys(const cpa_indexer *d, const cpa_indexer_weights *w, const cpa_model_step *step,
                             const cpa_layer_args *args, cpa_stream *stream) {
    const cpa_index_write_args write = {.size = sizeof write,
                                        .tokens = step->rows.count,
                                        .dtype = d->dtype,
                                        .k = d->k_product,
                                        .gamma = w->k_scale,
                                        .beta = w->k_shift,
                                        .eps = CPA_INDEX_NORM_EPS,
                                        .rope = d->rope,
                                        .positions = step->rows.positions_device,
                                        .slot_mapping = step->rows.slots_device,
                                        .cache = {.kv = args->index, .hadamard = is_spread(d)},
                                        .scales_pow2 = 1};
    return cpa_index_write(&write, stream);
}

static cpa_status give_queries(const cpa_indexer *d, const cpa_model_step *step, cpa_stream *stream) {
    const cpa_index_form *c = &d->config->index;
    const cpa_index_q_args args = {.size = sizeof args,
                                   .tokens = step->rows.count,
                                   .heads = c->heads,
                                   .dim = c->dim,
                                   .dtype = d->dtype,
                                   .q = d->q_product,
                                   .rope = d->rope,
                                   .positions = step->rows.positions_device,
                                   .hadamard = is_spread(d),
                                   .format = c->dtype == CPA_F32    ? CPA_INDEX_F32
                                             : c->dtype == CPA_BF16 ? CPA_INDEX_BF16
                                                                    : CPA_INDEX_FP8,
                                   .out = d->q,
                                   .weights = d->weight_product,
                                   .weight_dtype = CPA_F32,
                                   .weights_out = d->weights};
    return cpa_index_q(&args, stream);
}

cpa_status cpa_indexer_in(const cpa_indexer *d, const cpa_indexer_weights *w, const void *x, const void *q_latent,
                          int64_t q_latent_stride, const cpa_model_step *step, const cpa_layer_args *args,
                          cpa_stream *stream) {
    const cpa_model_config *c = d->config;
    const int64_t rows = step->rows.count;
    const int32_t heads = c->index.heads, dim = c->index.dim;
    CPA_TRY(multiply(d, rows, x, 0, c->hidden, w->k, dim, d->dtype, d->k_product, stream));
    CPA_TRY(multiply(d, rows, x, 0, c->hidden, w->weights, heads, CPA_F32, d->weight_product, stream));
    CPA_TRY(multiply(d, rows, q_latent, q_latent_stride, c->latent.q_latent, w->q, heads * dim, d->dtype, d->q_product,
                     stream));
    CPA_TRY(write_keys(d, w, step, args, stream));
    return give_queries(d, step, stream);
}

cpa_status cpa_indexer_select(const cpa_indexer *d, const cpa_select_args *args, cpa_key_indices *out,
                              cpa_stream *stream) {
    const cpa_context_select_args select = {.size = sizeof select,
                                            .q = d->q,
                                            .weights = d->weights,
                                            .cache = {.kv = args->index, .hadamard = is_spread(d)}};
    return args->chooser->choose(args->chooser->ctx, &select, out, stream);
}
