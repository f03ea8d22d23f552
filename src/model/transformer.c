#include "src/model/transformer.h"

#include <stdlib.h>

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "src/model/draft_layer.h"
#include "src/model/mixture_sent.h"
#include "src/model/sliced_linear.h"
#include "src/model/transformer_internal.h"
#include "src/model/transformer_step.h"

enum { DEFAULT_LOGIT_ROWS = 256, DEFAULT_EXPERT_ROWS = 4096 };

static int64_t rope_bytes(const cpa_model_config *c) {
    return c->rope.max_position * c->rope.dim * (int64_t)sizeof(float);
}

/* Whether steps with slices are taken: no slice is empty, and heads have keys. */
static int takes_slices(const cpa_transformer *t) {
    const cpa_model_config *c = &t->config;
    const int32_t ranks = t->options.ranks, experts = c->moe.experts;
    return t->options.slices != CPA_SLICES_NONE && ranks > 1 && c->q_heads >= ranks && !c->latent.latent &&
           cpa_slice_unit(cpa_qkv_width(c), ranks) > 0 && cpa_slice_unit(c->intermediate, ranks) > 0 &&
           cpa_slice_unit(c->vocabulary, ranks) > 0 && (experts == 0 || experts >= ranks);
}

/* Whether each expert lies on one rank alone, and rows travel. */
static int spreads_experts(const cpa_transformer *t) {
    return t->options.experts != CPA_EXPERTS_REPLICATED && t->options.ranks > 1 && t->config.moe.experts > 0;
}

/* What this rank has of the weights. */
static cpa_weights_part weights_part(const cpa_transformer *t) {
    const int sliced = t->options.slices == CPA_SLICES_ALL && takes_slices(t);
    cpa_weights_part part = {0, 1, 0, 1};
    if (sliced) part = (cpa_weights_part){t->options.rank, t->options.ranks, 0, 1};
    if (sliced || spreads_experts(t)) {
        part.expert_rank = t->options.rank;
        part.expert_ranks = t->options.ranks;
    }
    return part;
}

/* What steps need on the device, as a list for sizes, allocation and release. */
typedef struct buffer {
    void **memory;
    int64_t bytes;
} buffer;
enum { BUFFERS = 11 };

static void list_buffers(cpa_transformer *t, buffer list[BUFFERS]) {
    const cpa_model_config *c = &t->config;
    const int64_t bytes = cpa_dtype_bytes(t->options.dtype), row = t->options.max_rows * bytes;
    const int64_t last = t->logit_rows * c->hidden * bytes;
    const int64_t first = c->latent.latent ? cpa_latent_wide(c) : cpa_qkv_width(c);
    const int64_t joined = c->draft_layers > 0 ? cpa_draft_layer_wide(c) : 0;
    int64_t wide = cpa_max64(cpa_max64(first, joined), cpa_feed_forward_wide(c)) * bytes;
    int64_t inner = cpa_max64(cpa_feed_forward_inner(c), cpa_latent_inner(c)) * bytes;
    int64_t own_logits = 0;
    if (takes_slices(t)) {
        wide = cpa_max64(wide, c->hidden * (int64_t)sizeof(float));
        inner = cpa_max64(inner, cpa_slice_most(cpa_qkv_width(c), t->options.ranks) * bytes);
        own_logits = cpa_slice_most(c->vocabulary, t->options.ranks);
    }
    const buffer all[] = {
        {&t->residual, row * c->hidden},
        {&t->x, row * c->hidden},
        {&t->wide, t->options.max_rows * wide},
        {&t->inner, t->options.max_rows * inner},
        {&t->last_residual, last},
        {&t->last_x, last},
        {(void **)&t->logits, t->logit_rows * c->vocabulary * (int64_t)sizeof(float)},
        {(void **)&t->own_logits, t->logit_rows * own_logits * (int64_t)sizeof(float)},
        {(void **)&t->rope_table, rope_bytes(c)},
        {&t->mixture, cpa_mixture_place(&t->feed_forward.mixture, NULL)},
        {&t->indexed, cpa_indexer_place(&t->indexer, t->options.max_rows, NULL)},
    };
    _Static_assert(sizeof all == BUFFERS * sizeof *all, "as many as are listed");
    for (int i = 0; i < BUFFERS; i++) list[i] = all[i];
}

static void set_sizes(cpa_transformer *t, const cpa_model_config *config, const cpa_transformer_options *options) {
    t->config = *config;
    t->options = *options;
    t->logit_rows = options->logit_rows ? options->logit_rows : DEFAULT_LOGIT_ROWS;
    t->logit_rows = cpa_min64(t->logit_rows, cpa_min64(options->max_rows, options->max_sequences));
    const int32_t over = spreads_experts(t) ? options->ranks : 1;
    const int64_t at_once = (options->expert_rows ? options->expert_rows : DEFAULT_EXPERT_ROWS) / over;
    const int64_t piece = cpa_min64(options->max_rows, cpa_max64(at_once, 1));
    const int gathers = options->experts == CPA_EXPERTS_GATHERED;
    t->latent = cpa_latent_attention_of(&t->config, options->dtype);
    t->indexer = cpa_indexer_of(&t->config, options->dtype);
    t->feed_forward = (cpa_feed_forward){
        .config = &t->config,
        .dtype = options->dtype,
        .mixture = cpa_mixture_of(&t->config, options->dtype, weights_part(t), over, gathers, piece),
    };
}

int64_t cpa_transformer_bytes(const cpa_model_config *config, const cpa_transformer_options *options) {
    cpa_transformer counted = {.device = NULL};
    buffer list[BUFFERS];
    set_sizes(&counted, config, options);
    list_buffers(&counted, list);
    int64_t bytes = cpa_weights_bytes(config, weights_part(&counted), options->dtype);
    bytes += cpa_sampler_bytes(config->vocabulary, options->max_sequences);
    for (int i = 0; i < BUFFERS; i++) bytes += list[i].bytes;
    return bytes;
}

static cpa_status upload_rope(const cpa_transformer *t, cpa_stream *stream, cpa_error *err) {
    const int64_t bytes = rope_bytes(&t->config);
    float *table = malloc((size_t)bytes);
    if (!table) return cpa_fail(err, CPA_NO_MEMORY, "rotary positions: no memory for %lld bytes", (long long)bytes);
    cpa_status status = cpa_rope_table(&t->config.rope, table, err);
    if (status == CPA_OK) {
        status = t->device->table->copy(t->rope_table, table, bytes, stream);
        if (status == CPA_OK) status = t->device->table->stream_sync(stream);
        if (status != CPA_OK) cpa_fail(err, status, "rotary positions: %s", stream->error.message);
    }
    free(table);
    return status;
}

/* Whether what is to be shared out is enough for all ranks, and may be. */
static cpa_status check_ranks(const cpa_transformer *t, cpa_error *err) {
    const int32_t ranks = t->options.ranks, experts = t->config.moe.experts;
    if (t->options.slices == CPA_SLICES_ALL && ranks > 1 && t->config.latent.latent)
        return cpa_fail(err, CPA_UNSUPPORTED, "weights: slices are not supported with latent attention");
    if (t->options.slices == CPA_SLICES_ALL && ranks > 1 && !takes_slices(t)) {
        const int32_t most = experts > 0 && experts < t->config.q_heads ? experts : t->config.q_heads;
        return cpa_fail(err, CPA_UNSUPPORTED, "weights: found %d ranks, expected at most as many as %s, %d, for slices",
                        ranks, most == t->config.q_heads ? "heads" : "experts", most);
    }
    if (!spreads_experts(t) || t->options.experts == CPA_EXPERTS_GATHERED) return CPA_OK;
    return cpa_mixture_check_sent(t->device, err);
}

static cpa_status load(cpa_transformer *t, const cpa_safetensors *files, cpa_stream *stream, cpa_error *err) {
    buffer list[BUFFERS];
    const cpa_weights_part part = weights_part(t);
    CPA_TRY(check_ranks(t, err));
    CPA_TRY(cpa_weights_load(&t->config, part, files, t->options.dtype, stream, &t->weights, err));
    CPA_TRY(cpa_sampler_open(t->device, t->config.vocabulary, t->options.max_sequences, &t->sampler, err));
    list_buffers(t, list);
    for (int i = 0; i < BUFFERS; i++) CPA_TRY(cpa_device_alloc(t->device, list[i].bytes, list[i].memory, err));
    t->feed_forward.wide = t->wide;
    t->feed_forward.inner = t->inner;
    cpa_mixture_place(&t->feed_forward.mixture, t->mixture);
    cpa_indexer_place(&t->indexer, t->options.max_rows, t->indexed);
    t->indexer.rope.table = t->rope_table;
    t->latent.rope.table = t->rope_table;
    t->latent.wide = t->wide;
    t->latent.inner = t->inner;
    if (t->config.latent.latent) CPA_TRY(cpa_latent_forms_open(&t->config, &t->weights, &t->forms, err));
    CPA_TRY(upload_rope(t, stream, err));
    return cpa_transformer_warm_up(t, stream, err);
}

cpa_status cpa_transformer_create(cpa_device *device, const cpa_model_config *config, const cpa_safetensors *files,
                                  const cpa_transformer_options *options, cpa_transformer **out, cpa_error *err) {
    cpa_stream *stream = NULL;
    cpa_transformer *t = calloc(1, sizeof *t);
    if (!t) return cpa_fail(err, CPA_NO_MEMORY, "transformer: no memory");
    t->device = device;
    set_sizes(t, config, options);
    cpa_status status = cpa_stream_create(device, &stream, err);
    if (status == CPA_OK) status = load(t, files, stream, err);
    cpa_stream_destroy(stream);
    if (status != CPA_OK) {
        cpa_transformer_destroy(t);
        return status;
    }
    *out = t;
    return CPA_OK;
}

void cpa_transformer_destroy(cpa_transformer *transformer) {
    buffer list[BUFFERS];
    if (!transformer) return;
    list_buffers(transformer, list);
    for (int i = 0; i < BUFFERS; i++) cpa_device_free(transformer->device, *list[i].memory);
    cpa_sampler_close(&transformer->sampler);
    cpa_weights_release(&transformer->weights);
    cpa_latent_forms_close(&transformer->forms);
    free(transformer);
}

void cpa_transformer_set_observer(cpa_transformer *transformer, cpa_logits_fn observe, void *ctx) {
    transformer->observe = observe;
    transformer->observe_ctx = ctx;
}

cpa_model cpa_transformer_model(cpa_transformer *transformer) {
    return (cpa_model){
        .size = sizeof(cpa_model),
        .ctx = transformer,
        .begin_step = cpa_transformer_begin_step,
        .layer_in = cpa_transformer_layer_in,
        .layer_out = cpa_transformer_layer_out,
        .end_step = cpa_transformer_end_step,
        .capturable = !transformer->observe,
        .writes_cache = 1,
        .end_ids = transformer->config.end_ids,
        .n_end_ids = transformer->config.n_end_ids,
        .slices = takes_slices(transformer) ? transformer->options.slices : CPA_SLICES_NONE,
        .vocabulary = (int32_t)transformer->config.vocabulary,
        .gives_ranks = 1,
        .end_draft = transformer->config.draft_layers > 0 ? cpa_transformer_end_draft : NULL,
        .select = transformer->config.index.heads ? cpa_transformer_select_keys : NULL,
        .select_width = transformer->config.index.k,
    };
}

void cpa_transformer_give_forms(const cpa_transformer *transformer, cpa_model_shape *shape) {
    if (!transformer->config.latent.latent) return;
    shape->forms = transformer->forms.list;
    shape->n_forms = CPA_LATENT_FORMS;
    shape->decode_form = CPA_LATENT_ABSORBED;
    shape->prefill_form = CPA_LATENT_EXPANDED;
    if (transformer->config.index.heads) shape->index = &transformer->config.index;
}
