/* bench attend: the last tokens of some sequences against their whole contexts over a paged KV cache, whose unused
 * memory is poisoned. Calls take turns over copies of the cache, so that keys and values come from memory. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/check.h"
#include "kernels/kernels.h"
#include "launcher/bench_attend.h"
#include "launcher/bench_inputs.h"
#include "launcher/bench_memory.h"

typedef struct attend_state {
    cpa_bench_site *site;
    cpa_bench_attend_case shape;
    cpa_kv_view kv;                   /* of all copies */
    int64_t copies, k_bytes, v_bytes; /* how many, and of one */
    int32_t *block_tables;
    cpa_attend_plan *plan;
    void *q, *out;
    float *lse;
} attend_state;

static int64_t blocks_per_sequence(const attend_state *s) {
    return (s->shape.context + s->kv.block_size - 1) / s->kv.block_size;
}

static int64_t rows(const attend_state *s) {
    return s->shape.sequences * s->shape.new_tokens;
}

int64_t cpa_bench_attend_context(const cpa_bench_options *options, const cpa_bench_attend_case *shape,
                                 int64_t sequence) {
    int64_t context = options->ragged ? shape->context * (sequence % 8 + 1) / 8 : shape->context;
    return context > shape->new_tokens ? context : shape->new_tokens;
}

/* Writes one copy of the cache, and repeats it. */
static cpa_status make_cache(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    s->kv.block_size = (int32_t)o->block_size;
    int64_t blocks = s->shape.sequences * blocks_per_sequence(s), tokens = blocks * o->block_size;
    int64_t element = o->kv_heads * cpa_dtype_bytes((cpa_dtype)o->kv_dtype);
    s->k_bytes = tokens * o->k_dim * element;
    s->v_bytes = tokens * o->v_dim * element;
    s->copies = cpa_bench_copies(s->site, s->k_bytes + s->v_bytes);
    CPA_TRY(cpa_bench_make_cache(s->site, blocks * s->copies, &s->kv, err));
    CPA_TRY(cpa_bench_block_order(o, blocks, &s->block_tables, err));
    int64_t *positions = cpa_bench_positions(0, s->shape.context);
    cpa_status status = positions ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for positions");
    for (int64_t i = 0; status == CPA_OK && i < s->shape.sequences; i++) {
        status = cpa_bench_fill_cache(s->site, i, positions, cpa_bench_attend_context(o, &s->shape, i),
                                      s->block_tables + i * blocks_per_sequence(s), &s->kv, err);
    }
    free(positions);
    CPA_TRY(status);
    CPA_TRY(cpa_bench_replicate(s->site, s->kv.k, s->k_bytes, s->k_bytes * s->copies, err));
    return cpa_bench_replicate(s->site, s->kv.v, s->v_bytes, s->v_bytes * s->copies, err);
}

static cpa_status make_rows(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    int64_t head_rows = rows(s) * o->q_heads, element = cpa_dtype_bytes((cpa_dtype)o->dtype), t = s->shape.new_tokens;
    CPA_TRY(cpa_device_alloc(s->site->device, head_rows * o->k_dim * element, &s->q, err));
    CPA_TRY(cpa_bench_poisoned(s->site, head_rows * o->v_dim * element, &s->out, err));
    CPA_TRY(cpa_bench_poisoned(s->site, head_rows * (int64_t)sizeof *s->lse, (void **)&s->lse, err));
    cpa_status status = CPA_OK;
    for (int64_t i = 0; status == CPA_OK && i < s->shape.sequences; i++) {
        int64_t *positions = cpa_bench_positions(cpa_bench_attend_context(o, &s->shape, i) - t, t);
        char *q = (char *)s->q + i * t * o->q_heads * o->k_dim * element;
        status = positions ? cpa_bench_synthesize(s->site, CPA_SYNTH_Q, i, positions, t, q, err)
                           : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for positions");
        free(positions);
    }
    return status;
}

static cpa_status make_plan(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    cpa_attend_item *items = calloc((size_t)s->shape.sequences, sizeof *items);
    if (!items) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for items");
    for (int64_t i = 0; i < s->shape.sequences; i++) {
        int64_t context = cpa_bench_attend_context(o, &s->shape, i);
        items[i] = (cpa_attend_item){
            .q_row = i * s->shape.new_tokens,
            .q_count = s->shape.new_tokens,
            .q_first = context - s->shape.new_tokens,
            .k_count = context,
            .table = i * blocks_per_sequence(s),
        };
    }
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {.cp_size = 1, .interleave = (int32_t)o->block_size},
        .q_heads = (int32_t)o->q_heads,
        .kv_heads = (int32_t)o->kv_heads,
        .k_dim = (int32_t)o->k_dim,
        .v_dim = (int32_t)o->v_dim,
        .block_size = (int32_t)o->block_size,
        .items = items,
        .n_items = s->shape.sequences,
        .block_tables = s->block_tables,
        .n_table_entries = s->shape.sequences * blocks_per_sequence(s),
        .kv_dtype = (cpa_dtype)o->kv_dtype,
    };
    cpa_status status = cpa_attend_plan_create(s->site->device, &s->plan, err);
    if (status == CPA_OK) status = cpa_attend_plan_set(s->plan, &batch, err);
    free(items);
    return status;
}

/* Multiply-adds of Q K^T and P V over the pairs that the mask shows, and every operand moved once. */
static void count_work(const attend_state *s, cpa_bench_row *row) {
    const cpa_bench_options *o = &s->site->options;
    double t = (double)s->shape.new_tokens, widths = (double)(o->k_dim + o->v_dim);
    double q_bytes = (double)(o->q_heads * cpa_dtype_bytes((cpa_dtype)o->dtype));
    double kv_bytes = (double)(o->kv_heads * cpa_dtype_bytes((cpa_dtype)o->kv_dtype));
    row->flops = row->bytes = 0;
    for (int64_t i = 0; i < s->shape.sequences; i++) {
        double context = (double)cpa_bench_attend_context(o, &s->shape, i);
        double pairs = o->full ? t * context : t * (context - t) + 0.5 * t * (t + 1);
        row->flops += 2.0 * widths * (double)o->q_heads * pairs;
        row->bytes += widths * (context * kv_bytes + t * q_bytes);
    }
}

/* Makes the device take the kernels that the case names. */
static cpa_status use_path(cpa_bench_site *site, cpa_error *err) {
    const char *wanted = cpa_bench_paths[site->options.path], *path;
    for (int32_t i = 0; (path = site->device->kernels->attend_path(site->device, i)); i++) {
        if (site->options.path == 0 || strcmp(path, wanted) == 0) return CPA_OK;
    }
    (void)site->device->kernels->attend_path(site->device, 0);
    return cpa_fail(err, CPA_UNSUPPORTED, "bench attend: kernels=%s: %s has none, expected a CUDA device that has",
                    wanted, cpa_device_description(site->device));
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    attend_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory");
    *state = s;
    s->site = site;
    s->shape = (cpa_bench_attend_case){.sequences = shape[0], .new_tokens = shape[1], .context = shape[2]};
    if (s->shape.new_tokens > s->shape.context) {
        return cpa_fail(err, CPA_INVALID, "bench attend: %lld new tokens in a context of %lld",
                        (long long)s->shape.new_tokens, (long long)s->shape.context);
    }
    CPA_TRY(use_path(site, err));
    count_work(s, row);
    CPA_TRY(make_cache(s, err));
    CPA_TRY(make_rows(s, err));
    return make_plan(s, err);
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    attend_state *s = state;
    int64_t copy = call % s->copies;
    cpa_kv_view kv = s->kv;
    kv.num_blocks /= s->copies;
    kv.k = (char *)kv.k + copy * s->k_bytes;
    kv.v = (char *)kv.v + copy * s->v_bytes;
    cpa_attend_args args = {
        .size = sizeof args,
        .q = s->q,
        .q_dtype = (cpa_dtype)s->site->options.dtype,
        .kv = kv,
        .mask = {.causal = !s->site->options.full},
        .state = {.lse = s->lse, .lse_row_stride = s->site->options.q_heads},
        .out = s->out,
    };
    return cpa_bench_enqueued(s->site, cpa_attend(s->plan, &args, s->site->stream), err);
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    attend_state *s = state;
    const cpa_bench_options *o = &s->site->options;
    int64_t out_bytes = rows(s) * o->q_heads * o->v_dim * cpa_dtype_bytes((cpa_dtype)o->dtype);
    int64_t lse_bytes = rows(s) * o->q_heads * (int64_t)sizeof(float);
    void *out = malloc((size_t)out_bytes);
    float *lse = malloc((size_t)lse_bytes);
    cpa_status status = out && lse ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for results");
    if (status == CPA_OK) status = cpa_bench_copy(s->site, out, s->out, out_bytes, err);
    if (status == CPA_OK) status = cpa_bench_copy(s->site, lse, s->lse, lse_bytes, err);
    if (status == CPA_OK) {
        status = cpa_bench_attend_check(s->site, &s->shape, out, lse, &row->checked, &row->wrong, err);
    }
    free(lse);
    free(out);
    return status;
}

static void release(void *state) {
    attend_state *s = state;
    if (!s) return;
    cpa_attend_plan_destroy(s->plan);
    cpa_device_free(s->site->device, s->lse);
    cpa_device_free(s->site->device, s->out);
    cpa_device_free(s->site->device, s->q);
    free(s->block_tables);
    cpa_device_free(s->site->device, s->kv.v);
    cpa_device_free(s->site->device, s->kv.k);
    free(s);
}

const cpa_bench cpa_bench_attend = {
    .name = "attend",
    .dims = "sequences x new tokens x context",
    .n_dims = 3,
    .shapes_host = "1x1Kx1K,1x2Kx2K,1x8Kx8K,4x1x64K",
    .shapes_cuda =
        "1x8Kx8K,1x16Kx16K,1x32Kx32K,1x64Kx64K,"
        "1x8Kx8K:pages=ordered,1x16Kx16K:pages=ordered,1x32Kx32K:pages=ordered,1x64Kx64K:pages=ordered,"
        "1x16Kx16K:block-size=16,1x16Kx16K:mask=full,1x16Kx16K:dtype=fp16,1x16Kx16K:kernels=portable,"
        "1x16Kx16K:head-dim=64,1x16Kx16K:head-dim=64:mask=full,1x16Kx16K:head-dim=256,"
        "1x16Kx16K:head-dim=256:mask=full,1x16Kx16K:head-dim=192:v-head-dim=128,"
        "1x8Kx128K,1x64x128K,16x1Kx8K:ragged=true,"
        "1x1x1K,1x1x16K,1x1x128K,16x1x1K,16x1x16K,16x1x128K,128x1x1K,128x1x16K,64x1x16K,"
        "1x1x16K:block-size=16,16x1x16K:block-size=16,128x1x16K:block-size=16,64x1x16K:block-size=16,"
        "64x1x16K:ragged=true,64x4x16K,64x1x16K:head-dim=64,64x1x16K:head-dim=192:v-head-dim=128,"
        "64x1x16K:head-dim=256",
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
