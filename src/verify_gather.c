#include "src/verify_gather.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/kernels.h"

enum { EXCHANGE_BYTES = 16 << 20 };

typedef struct part {
    const cpa_verify_group *group;
    int64_t index;
    int32_t last;
} part;

/* One call of cpa_verify_gather. */
typedef struct gather {
    cpa_verify *verify;
    const cpa_step_plan *plan;
    cpa_owner_map map;
    int32_t rank, size;
    int64_t k_bytes, v_bytes; /* of one token's key and value of one head, each with its scale */
    part *parts;              /* to be exchanged next */
    int64_t n_parts, cap_parts, pending_bytes;
    char *send, *recv;
    int64_t send_capacity, recv_capacity;
    int64_t *send_bytes, *recv_bytes, *cursor; /* [size] */
    cpa_verify_piece *pieces;                  /* [size] */
    cpa_verify_part_fn fn;
    void *ctx;
} gather;

static const cpa_plan_chunk *chunk_of(const gather *g, const cpa_verify_group *group) {
    return &g->plan->chunks[g->verify->samples[group->first].chunk];
}

/* The tokens of a rank's shard that a part holds. */
static int64_t part_tokens(const gather *g, const part *p, int32_t rank) {
    int32_t slot = cpa_owner_slot(g->map, rank, chunk_of(g, p->group)->phase);
    int64_t left = cpa_shard_len(g->map, slot, p->group->last_position + 1) - p->index * CPA_PART_TOKENS;
    return left < 0 ? 0 : left < CPA_PART_TOKENS ? left : CPA_PART_TOKENS;
}

/* How many samples of a group a rank owns. */
static int64_t owned_samples(const gather *g, const cpa_verify_group *group, int32_t rank) {
    const cpa_verify_sample *samples = g->verify->samples + group->first;
    int64_t owned = 0;
    for (int64_t i = 0; i < group->count; i++) {
        owned += cpa_owner_rank(g->map, chunk_of(g, group)->phase, samples[i].position) == rank;
    }
    return owned;
}

static int64_t sample_bytes(const gather *g, const part *p, int32_t rank) {
    return p->index == 0 ? owned_samples(g, p->group, rank) * g->verify->sample_bytes : 0;
}

static int64_t part_bytes(const gather *g, const part *p, int32_t rank) {
    return sample_bytes(g, p, rank) + part_tokens(g, p, rank) * (g->k_bytes + g->v_bytes);
}

/* One pool of a cache, in bytes. */
typedef struct pool {
    const char *memory;
    int64_t block, token, head;     /* strides */
    int64_t row_bytes, scale_bytes; /* a row and its scale, which lie apart here and side by side in a part */
} pool;

/* Reads rows of one head out of a block: tokens [offset, offset + n). */
static cpa_status read_rows(const gather *g, const cpa_kv_view *kv, const pool *p, int64_t block, int32_t head,
                            int64_t offset, int64_t n, char *out) {
    cpa_worker *worker = g->verify->worker;
    const cpa_kernel_table *kernels = worker->device->kernels;
    const char *in_block = p->memory + block * p->block;
    int64_t pitch = p->row_bytes + p->scale_bytes;
    CPA_TRY(kernels->copy_rows(out, pitch, in_block + offset * p->token + head * p->head, p->token, p->row_bytes, n,
                               worker->stream));
    if (!p->scale_bytes) return CPA_OK;
    const char *scales = in_block + cpa_kv_scales_at(kv, p->block);
    return kernels->copy_rows(out + p->row_bytes, pitch, scales + (head * kv->block_size + offset) * p->scale_bytes,
                              p->scale_bytes, p->scale_bytes, n, worker->stream);
}

/* Reads the keys and values of one head, local tokens [first, first + count) of a sequence, out of this rank's pages. */
static cpa_status read_cache(const gather *g, const cpa_verify_group *group, int64_t first, int64_t count, char *k_out,
                             char *v_out) {
    cpa_worker *worker = g->verify->worker;
    const cpa_worker_seq *seq = &worker->seqs[chunk_of(g, group)->seq];
    cpa_kv_view kv = cpa_worker_layer_kv(worker, g->verify->samples[group->first].layer);
    int64_t element = cpa_dtype_bytes(kv.dtype);
    pool k = {kv.k,
              kv.k_block_stride * element,
              kv.k_token_stride * element,
              kv.k_head_stride * element,
              kv.k_dim * element,
              cpa_kv_scale_bytes(kv.dtype, kv.k_scale)};
    pool v = {kv.v,
              kv.v_block_stride * element,
              kv.v_token_stride * element,
              kv.v_head_stride * element,
              kv.v_dim * element,
              cpa_kv_scale_bytes(kv.dtype, kv.v_scale)};
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t token = first + done, offset = token % kv.block_size, block = seq->blocks[token / kv.block_size];
        n = kv.block_size - offset < count - done ? kv.block_size - offset : count - done;
        CPA_TRY(read_rows(g, &kv, &k, block, group->kv_head, offset, n, k_out + done * g->k_bytes));
        CPA_TRY(read_rows(g, &kv, &v, block, group->kv_head, offset, n, v_out + done * g->v_bytes));
    }
    return CPA_OK;
}

/* Writes what this rank contributes to a part at *at and moves *at past it. */
static cpa_status write_part(const gather *g, const part *p, char **at) {
    const cpa_verify *verify = g->verify;
    for (int64_t i = 0; p->index == 0 && i < p->group->count; i++) {
        const cpa_verify_sample *sample = &verify->samples[p->group->first + i];
        if (cpa_owner_rank(g->map, chunk_of(g, p->group)->phase, sample->position) != g->rank) continue;
        memcpy(*at, verify->data + sample->data * verify->sample_bytes, (size_t)verify->sample_bytes);
        *at += verify->sample_bytes;
    }
    int64_t tokens = part_tokens(g, p, g->rank);
    CPA_TRY(read_cache(g, p->group, p->index * CPA_PART_TOKENS, tokens, *at, *at + tokens * g->k_bytes));
    *at += tokens * (g->k_bytes + g->v_bytes);
    return CPA_OK;
}

static cpa_status reserve_bytes(char **memory, int64_t *capacity, int64_t need, cpa_error *err) {
    if (need <= *capacity) return CPA_OK;
    char *grown = realloc(*memory, (size_t)need);
    if (!grown) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld bytes", (long long)need);
    *memory = grown;
    *capacity = need;
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
    CPA_TRY(reserve_bytes(&g->send, &g->send_capacity, sent, err));
    CPA_TRY(reserve_bytes(&g->recv, &g->recv_capacity, received, err));
    char *at = g->send;
    for (int32_t checker = 0; checker < g->size; checker++) {
        for (int64_t i = 0; i < g->n_parts; i++) {
            if (g->parts[i].group->checker == checker) CPA_TRY(write_part(g, &g->parts[i], &at));
        }
    }
    return g->verify->worker->device->kernels->stream_sync(g->verify->worker->stream);
}

/* Finds the next part in what each rank sent. */
static void read_pieces(gather *g, const part *p) {
    for (int32_t r = 0; r < g->size; r++) {
        cpa_verify_piece *piece = &g->pieces[r];
        piece->tokens = part_tokens(g, p, r);
        piece->first = p->index * CPA_PART_TOKENS;
        piece->samples = g->recv + g->cursor[r];
        piece->k = piece->samples + sample_bytes(g, p, r);
        piece->v = piece->k + piece->tokens * g->k_bytes;
        piece->k_bytes = g->k_bytes;
        piece->v_bytes = g->v_bytes;
        g->cursor[r] += part_bytes(g, p, r);
    }
}

/* Exchanges the pending parts and hands this rank's on. */
static cpa_status flush_parts(gather *g, cpa_error *err) {
    if (g->n_parts == 0) return CPA_OK;
    CPA_TRY(write_parts(g, err));
    CPA_TRY(cpa_control_exchange(g->verify->control, g->send, g->send_bytes, g->recv, g->recv_bytes, err));
    int64_t first = 0;
    for (int32_t r = 0; r < g->size; first += g->recv_bytes[r], r++) g->cursor[r] = first;
    for (int64_t i = 0; i < g->n_parts; i++) {
        const part *p = &g->parts[i];
        if (p->group->checker != g->rank) continue;
        read_pieces(g, p);
        CPA_TRY(g->fn(g->ctx, p->group, p->index, p->last, g->pieces, err));
    }
    g->n_parts = g->pending_bytes = 0;
    return CPA_OK;
}

static cpa_status add_part(gather *g, part p, cpa_error *err) {
    if (g->n_parts == g->cap_parts) {
        int64_t grown = g->cap_parts ? 2 * g->cap_parts : 64;
        part *parts = realloc(g->parts, (size_t)grown * sizeof *parts);
        if (!parts) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld parts", (long long)grown);
        g->parts = parts;
        g->cap_parts = grown;
    }
    g->parts[g->n_parts++] = p;
    for (int32_t r = 0; r < g->size; r++) g->pending_bytes += part_bytes(g, &p, r);
    return g->pending_bytes < EXCHANGE_BYTES ? CPA_OK : flush_parts(g, err);
}

static cpa_status gather_groups(gather *g, const cpa_verify_group *groups, int64_t n_groups, cpa_error *err) {
    g->send_bytes = calloc(3 * (size_t)g->size, sizeof *g->send_bytes);
    g->pieces = calloc((size_t)g->size, sizeof *g->pieces);
    if (!g->send_bytes || !g->pieces) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory");
    g->recv_bytes = g->send_bytes + g->size;
    g->cursor = g->recv_bytes + g->size;
    for (int64_t i = 0; i < n_groups; i++) {
        /* Slot 0 holds the most tokens of any prefix. */
        int64_t longest = cpa_shard_len(g->map, 0, groups[i].last_position + 1);
        int64_t n_parts = (longest + CPA_PART_TOKENS - 1) / CPA_PART_TOKENS;
        for (int64_t p = 0; p < n_parts; p++) CPA_TRY(add_part(g, (part){&groups[i], p, p + 1 == n_parts}, err));
    }
    return flush_parts(g, err);
}

cpa_status cpa_verify_gather(cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_group *groups,
                             int64_t n_groups, cpa_verify_part_fn fn, void *ctx, cpa_error *err) {
    const cpa_worker_options *options = &verify->worker->options;
    int64_t element = cpa_dtype_bytes(options->kv_dtype);
    gather g = {
        .verify = verify,
        .plan = plan,
        .map = options->map,
        .rank = verify->control->rank,
        .size = verify->control->size,
        .k_bytes = options->model.head_dim * element + cpa_kv_scale_bytes(options->kv_dtype, options->k_scale),
        .v_bytes = options->model.v_head_dim * element + cpa_kv_scale_bytes(options->kv_dtype, options->v_scale),
        .fn = fn,
        .ctx = ctx,
    };
    cpa_status status = gather_groups(&g, groups, n_groups, err);
    free(g.recv);
    free(g.send);
    free(g.pieces);
    free(g.send_bytes);
    free(g.parts);
    return status;
}
