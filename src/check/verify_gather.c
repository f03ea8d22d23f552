#include "src/check/verify_gather.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/block_layout.h"
#include "kernels/operators.h"
#include "src/cache/layer_groups.h"
#include "src/worker/layer_caches.h"

enum { EXCHANGE_BYTES = 32 << 20 };

/* Of one token's key, and value, of one head, each with its scale. */
typedef struct token_bytes {
    int64_t k, v;
} token_bytes;

/* One call of cpa_verify_gather. */
typedef struct gather {
    cpa_verify *verify;
    const cpa_step_plan *plan;
    cpa_owner_map map;
    int32_t rank, size;
    token_bytes bytes[2]; /* of a cache that is quantised, and of one that is not */
    int64_t index_bytes;  /* of a token's index key, with its scale; 0: there is none */
    int64_t part_tokens;
    cpa_verify_part *parts; /* parts to be exchanged next */
    int64_t n_parts, cap_parts, cap_received, cap_pieces, pending_bytes;
    cpa_verify_part *received; /* the parts that this rank checks */
    int64_t n_received;
    cpa_verify_piece *pieces;                  /* [n_received][size] pieces of the received parts */
    int64_t *send_bytes, *recv_bytes, *cursor; /* [size] */
    cpa_verify_parts_fn fn;
    void *ctx;
} gather;

static const cpa_plan_chunk *chunk_of(const gather *g, const cpa_verify_group *group) {
    return &g->plan->chunks[g->verify->samples[group->first].chunk];
}

/* The local tokens of a rank that are precise. */
static int64_t precise_on(const gather *g, const cpa_verify_group *group, int32_t rank) {
    const cpa_token_set tokens = cpa_tokens_on(g->map, chunk_of(g, group)->placement, rank);
    return cpa_tokens_before(g->map, tokens, cpa_layer_groups_precise_tokens(&g->verify->worker->options.groups));
}

/* The tokens of a rank's shard that a part holds. */
static cpa_kv_range range_of(const gather *g, const cpa_verify_part *p, int32_t rank) {
    const cpa_token_set tokens = cpa_tokens_on(g->map, chunk_of(g, p->group)->placement, rank);
    const int64_t end = cpa_tokens_before(g->map, tokens, p->group->last_position + 1);
    const int64_t precise = cpa_min64(precise_on(g, p->group, rank), end);
    const int64_t first = (p->is_precise ? 0 : precise) + p->index * g->part_tokens;
    const int64_t left = (p->is_precise ? precise : end) - first;
    return (cpa_kv_range){.first = first, .count = cpa_max64(0, cpa_min64(left, g->part_tokens))};
}

static int64_t tokens_of(const gather *g, const cpa_verify_part *p, int32_t rank) {
    return range_of(g, p, rank).count;
}

/* How many samples of a group a rank keeps. */
static int64_t owned_samples(const gather *g, const cpa_verify_group *group, int32_t rank) {
    const cpa_verify_sample *samples = g->verify->samples + group->first;
    int64_t owned = 0;
    for (int64_t i = 0; i < group->count; i++) {
        owned += cpa_verify_keeper(g->verify, g->plan, &samples[i]) == rank;
    }
    return owned;
}

static int64_t sample_bytes(const gather *g, const cpa_verify_part *p, int32_t rank) {
    return p->is_first ? owned_samples(g, p->group, rank) * g->verify->sample_bytes : 0;
}

static token_bytes bytes_of(const gather *g, const cpa_verify_part *p) {
    const int32_t layer = g->verify->samples[p->group->first].layer;
    return g->bytes[p->is_precise || cpa_model_leaves_layer(&g->verify->worker->options.model, layer)];
}

/* Bytes of one token in a part. */
static int64_t all_bytes(const gather *g, const cpa_verify_part *p) {
    const token_bytes bytes = bytes_of(g, p);
    return bytes.k + bytes.v + (p->group->judges ? g->index_bytes : 0);
}

static int64_t part_bytes(const gather *g, const cpa_verify_part *p, int32_t rank) {
    return sample_bytes(g, p, rank) + tokens_of(g, p, rank) * all_bytes(g, p);
}

/* One head of a cache as a cache of its own, and where its tokens go. The scales of a quantised cache lie apart, so
 * that codes and scales are two such pairs. */
typedef struct head_copy {
    cpa_kv_view head, out;
} head_copy;

static head_copy copy_of_head(const cpa_kv_view *all, int32_t head, int64_t count, char *k_out, char *v_out) {
    int64_t element = cpa_dtype_bytes(all->dtype);
    head_copy copy = {*all, {.k = k_out, .v = v_out, .dtype = all->dtype, .block_size = all->block_size}};
    if (cpa_dtype_is_quantised(all->dtype)) {
        copy.head.dtype = copy.out.dtype = CPA_FP8_E4M3; /* bytes alone */
        copy.head.k_dim = (int32_t)cpa_kv_row_bytes(all->dtype, CPA_KEYS, all->k_dim);
        copy.head.v_dim = (int32_t)cpa_kv_row_bytes(all->dtype, CPA_VALUES, all->v_dim);
        copy.head.k_scale = copy.head.v_scale = 1;
        copy.head.k_scales = copy.head.v_scales = NULL;
        copy.head.n_scales = 0;
    }
    copy.head.kv_heads = 1;
    copy.head.k = (char *)all->k + head * all->k_head_stride * element;
    if (!all->v_in_k) copy.head.v = (char *)all->v + head * all->v_head_stride * element;
    copy.out.num_blocks = (count + all->block_size - 1) / all->block_size;
    copy.out.kv_heads = 1;
    copy.out.k_dim = copy.head.k_dim;
    copy.out.v_dim = copy.head.v_dim;
    copy.out.v_in_k = all->v_in_k;
    copy.out.k_block_stride = (int64_t)all->block_size * copy.out.k_dim;
    copy.out.v_block_stride = (int64_t)all->block_size * copy.out.v_dim;
    copy.out.k_scale = copy.head.k_scale;
    copy.out.v_scale = copy.head.v_scale;
    return copy;
}

/* The scale words of a head as a cache of rows of fp32. */
static head_copy copy_of_scales(const cpa_kv_view *all, int32_t head, int64_t count, char *k_out, char *v_out) {
    const int64_t bytes = cpa_kv_pool_of(all, CPA_KEYS).scale_bytes, at = head * all->block_size * bytes;
    const int32_t words_of_row = (int32_t)bytes / 4;
    cpa_kv_view words = {.k = (char *)all->k + cpa_kv_words_at(all, CPA_KEYS) + at,
                         .v = all->v_in_k ? NULL : (char *)all->v + cpa_kv_words_at(all, CPA_VALUES) + at,
                         .v_in_k = all->v_in_k,
                         .block_size = all->block_size,
                         .num_blocks = all->num_blocks,
                         .kv_heads = 1,
                         .k_dim = words_of_row,
                         .v_dim = words_of_row,
                         .k_block_stride = all->k_block_stride / 4,
                         .v_block_stride = all->v_block_stride / 4,
                         .k_token_stride = words_of_row,
                         .v_token_stride = words_of_row,
                         .k_head_stride = words_of_row,
                         .v_head_stride = words_of_row};
    return copy_of_head(&words, 0, count, k_out, v_out);
}

/* Starts the copy of one head's keys and values, the tokens of a part, out of this rank's pages: codes, then scales, of
 * keys and of values. */
static cpa_status read_cache(const gather *g, const cpa_verify_part *p, const cpa_kv_view *all, int32_t head,
                             char *k_out, char *v_out) {
    cpa_worker *worker = g->verify->worker;
    const int32_t of_layer = worker->places[g->verify->samples[p->group->first].layer].group;
    const int32_t tables = p->is_precise ? cpa_layer_groups_precise(&worker->options.groups) : of_layer;
    const cpa_kv_range range = range_of(g, p, g->rank);
    const int64_t count = range.count;
    if (count == 0) return CPA_OK;
    head_copy rows = copy_of_head(all, head, count, k_out, v_out);
    cpa_kv_pack_args args = {.size = sizeof args,
                             .src = rows.head,
                             .dst = rows.out,
                             .block_tables = cpa_worker_blocks(worker, tables, chunk_of(g, p->group)->seq),
                             .ranges = &range,
                             .n_ranges = 1};
    CPA_TRY(worker->device->operators->kv_pack(&args, worker->stream));
    if (!cpa_kv_words_at(all, CPA_KEYS)) return CPA_OK;
    head_copy scales = copy_of_scales(all, head, count, k_out + count * rows.out.k_dim, v_out + count * rows.out.v_dim);
    args.src = scales.head;
    args.dst = scales.out;
    return worker->device->operators->kv_pack(&args, worker->stream);
}

/* Writes what this rank contributes to a part at *at and moves *at past it. */
static cpa_status write_part(const gather *g, const cpa_verify_part *p, char **at) {
    const cpa_verify *verify = g->verify;
    for (int64_t i = 0; p->is_first && i < p->group->count; i++) {
        const cpa_verify_sample *sample = &verify->samples[p->group->first + i];
        if (cpa_verify_keeper(verify, g->plan, sample) != g->rank) continue;
        memcpy(*at, verify->data.bytes + sample->data * verify->sample_bytes, (size_t)verify->sample_bytes);
        *at += verify->sample_bytes;
    }
    const int64_t tokens = tokens_of(g, p, g->rank);
    const int32_t layer = verify->samples[p->group->first].layer;
    const cpa_kv_view kv =
        p->is_precise ? cpa_worker_precise(verify->worker, layer) : cpa_worker_kv(verify->worker, layer);
    const cpa_kv_view index = cpa_worker_index(verify->worker, layer);
    const token_bytes bytes = bytes_of(g, p);
    char *index_out = *at + tokens * (bytes.k + bytes.v);
    CPA_TRY(read_cache(g, p, &kv, p->group->kv_head, *at, *at + tokens * bytes.k));
    if (p->group->judges) CPA_TRY(read_cache(g, p, &index, 0, index_out, index_out));
    *at += tokens * all_bytes(g, p);
    return CPA_OK;
}

/* Sizes the exchange of the pending parts and writes this rank's side of it, checker after checker. */
static cpa_status write_parts(gather *g, cpa_error *err) {
    int64_t sent = 0, received = 0;
    memset(g->send_bytes, 0, (size_t)g->size * sizeof *g->send_bytes);
    memset(g->recv_bytes, 0, (size_t)g->size * sizeof *g->recv_bytes);
    for (int64_t i = 0; i < g->n_parts; i++) {
        int32_t checker = g->parts[i].group->checker;
        int64_t mine = part_bytes(g, &g->parts[i], g->rank);
        g->send_bytes[checker] += mine;
        sent += mine;
        for (int32_t r = 0; checker == g->rank && r < g->size; r++) {
            int64_t bytes = part_bytes(g, &g->parts[i], r);
            g->recv_bytes[r] += bytes;
            received += bytes;
        }
    }
    CPA_TRY(cpa_verify_reserve(g->verify, &g->verify->send, sent, 0, err));
    CPA_TRY(cpa_verify_reserve(g->verify, &g->verify->recv, received, 0, err));
    char *at = g->verify->send.bytes;
    for (int32_t checker = 0; checker < g->size; checker++) {
        for (int64_t i = 0; i < g->n_parts; i++) {
            if (g->parts[i].group->checker == checker) CPA_TRY(write_part(g, &g->parts[i], &at));
        }
    }
    return g->verify->worker->device->table->stream_sync(g->verify->worker->stream);
}

/* Finds the next part in what each rank sent. */
static void read_pieces(gather *g, const cpa_verify_part *p) {
    cpa_verify_piece *pieces = g->pieces + g->n_received * g->size;
    for (int32_t r = 0; r < g->size; r++) {
        cpa_verify_piece *piece = &pieces[r];
        const cpa_kv_range range = range_of(g, p, r);
        piece->tokens = range.count;
        piece->first = range.first;
        piece->samples = g->verify->recv.bytes + g->cursor[r];
        piece->k = piece->samples + sample_bytes(g, p, r);
        const token_bytes bytes = bytes_of(g, p);
        piece->v = piece->k + piece->tokens * bytes.k;
        piece->index = p->group->judges ? piece->v + piece->tokens * bytes.v : NULL;
        g->cursor[r] += part_bytes(g, p, r);
    }
    g->received[g->n_received] = *p;
    g->received[g->n_received++].pieces = pieces;
}

/* Exchanges the pending parts and hands this rank's on. */
static cpa_status flush_parts(gather *g, cpa_error *err) {
    if (g->n_parts == 0) return CPA_OK;
    CPA_TRY(write_parts(g, err));
    CPA_TRY(cpa_control_exchange(g->verify->control, g->verify->send.bytes, g->send_bytes, g->verify->recv.bytes,
                                 g->recv_bytes, err));
    int64_t first = 0;
    for (int32_t r = 0; r < g->size; first += g->recv_bytes[r], r++) g->cursor[r] = first;
    g->n_received = 0;
    for (int64_t i = 0; i < g->n_parts; i++) {
        if (g->parts[i].group->checker == g->rank) read_pieces(g, &g->parts[i]);
    }
    g->n_parts = g->pending_bytes = 0;
    return g->n_received > 0 ? g->fn(g->ctx, g->received, g->n_received, err) : CPA_OK;
}

/* Room for one more part, whoever checks it. */
static cpa_status reserve_part(gather *g, cpa_error *err) {
    const int64_t n = g->n_parts + 1;
    if (cpa_array_reserve(&g->parts, &g->cap_parts, n, sizeof *g->parts) &&
        cpa_array_reserve(&g->received, &g->cap_received, n, sizeof *g->received) &&
        cpa_array_reserve(&g->pieces, &g->cap_pieces, n * g->size, sizeof *g->pieces))
        return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld parts", (long long)n);
}

/* Memory of the matrix that the keys of a part are expanded by, in two forms. */
static int64_t expansion_bytes(const gather *g, const cpa_verify_part *p) {
    const cpa_form *form = cpa_verify_form(g->verify, &g->verify->samples[p->group->first]);
    const int64_t latent = g->verify->worker->options.model.attention.v_dim;
    return form->is_expanded ? (form->shape.k_dim + form->shape.v_dim) * latent * 2 * (int64_t)sizeof(float) : 0;
}

/* A round is bounded by its bytes and by the memory of the rows that its pieces give. */
static cpa_status add_part(gather *g, cpa_verify_part p, cpa_error *err) {
    CPA_TRY(reserve_part(g, err));
    g->parts[g->n_parts++] = p;
    for (int32_t r = 0; r < g->size; r++) g->pending_bytes += part_bytes(g, &p, r);
    g->pending_bytes += p.group->count * g->size * (int64_t)sizeof(cpa_reference_row) + expansion_bytes(g, &p);
    return g->pending_bytes < EXCHANGE_BYTES ? CPA_OK : flush_parts(g, err);
}

/* The parts of a group: those of what is precise, then those of the cache behind it. */
static cpa_status add_group(gather *g, const cpa_verify_group *group, cpa_error *err) {
    int64_t longest[2] = {0, 0}; /* tokens of the rank with the most, behind what is precise, and of that */
    for (int32_t r = 0; r < g->size; r++) {
        const cpa_token_set tokens = cpa_tokens_on(g->map, chunk_of(g, group)->placement, r);
        const int64_t end = cpa_tokens_before(g->map, tokens, group->last_position + 1);
        const int64_t precise = cpa_min64(precise_on(g, group, r), end);
        longest[1] = cpa_max64(longest[1], precise);
        longest[0] = cpa_max64(longest[0], end - precise);
    }
    const int64_t n_precise = (longest[1] + g->part_tokens - 1) / g->part_tokens;
    const int64_t n = n_precise + (longest[0] + g->part_tokens - 1) / g->part_tokens;
    for (int64_t p = 0; p < n; p++) {
        const int is_precise = p < n_precise;
        CPA_TRY(add_part(g,
                         (cpa_verify_part){.group = group,
                                           .index = is_precise ? p : p - n_precise,
                                           .is_precise = is_precise,
                                           .is_first = p == 0,
                                           .last = p + 1 == n},
                         err));
    }
    return CPA_OK;
}

static cpa_status gather_groups(gather *g, const cpa_verify_group *groups, int64_t n_groups, cpa_error *err) {
    g->send_bytes = calloc(3 * (size_t)g->size, sizeof *g->send_bytes);
    if (!g->send_bytes) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory");
    g->recv_bytes = g->send_bytes + g->size;
    g->cursor = g->recv_bytes + g->size;
    for (int64_t i = 0; i < n_groups; i++) CPA_TRY(add_group(g, &groups[i], err));
    return flush_parts(g, err);
}

static token_bytes bytes_in(const cpa_block_layout *layout) {
    const cpa_block_section *keys = &layout->sections[0];
    const cpa_block_section *values = cpa_block_section_of(layout, CPA_SECTION_VALUES);
    return (token_bytes){keys->row_bytes + keys->scale_bytes, values ? values->row_bytes + values->scale_bytes : 0};
}

cpa_status cpa_verify_gather(cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_group *groups,
                             int64_t n_groups, cpa_verify_parts_fn fn, void *ctx, cpa_error *err) {
    const cpa_worker_options *options = &verify->worker->options;
    const cpa_attention_shape *shape = &options->model.attention, unquantised = cpa_shape_unquantised(shape);
    const cpa_block_layout layout =
        cpa_block_layout_indexed(shape, cpa_layer_groups_index(&options->model), options->block_size);
    const cpa_block_layout left = cpa_block_layout_of(&unquantised, options->block_size);
    const cpa_block_section *index = cpa_block_section_of(&layout, CPA_SECTION_INDEX);
    gather g = {
        .verify = verify,
        .plan = plan,
        .map = options->map,
        .rank = verify->control->rank,
        .size = verify->control->size,
        .bytes = {bytes_in(&layout), bytes_in(&left)},
        .index_bytes = index ? index->row_bytes + index->scale_bytes : 0,
        .part_tokens = options->block_size > CPA_PART_TOKENS ? options->block_size : CPA_PART_TOKENS,
        .fn = fn,
        .ctx = ctx,
    };
    cpa_status status = gather_groups(&g, groups, n_groups, err);
    free(g.pieces);
    free(g.received);
    free(g.parts);
    free(g.send_bytes);
    return status;
}
