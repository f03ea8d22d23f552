/* bench attend: the last tokens of some sequences against their whole contexts over a paged KV cache, whose unused
 * memory is poisoned; bench offload, the same over a cache on the host, through a ring; and bench varlen, whole prompts
 * of many lengths in steps of so many tokens. Calls take turns over copies of the cache, so that keys and values come
 * from memory. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/offload.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/attend.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/rules.h"
#include "kernels/attend_plan.h"
#include "kernels/block_layout.h"
#include "kernels/self_test.h"

typedef struct attend_state {
    cpa_bench_site *site;
    cpa_bench_attend_work work;
    cpa_kv_view kv; /* cache blocks of all copies */
    int64_t copies;
    int64_t cache_bytes;      /* bytes of one copy of the cache */
    int32_t *block_tables;    /* block tables of all sequences, one after another */
    int64_t *tables;          /* [n_sequences + 1] where that of each begins */
    cpa_attend_plan **plans;  /* [n_steps] */
    int is_on_host;           /* the cache lies in page-locked memory of the host */
    cpa_kv_ring *ring;        /* through which it comes to the device */
    cpa_ring_plan *ring_plan; /* of the only step */
    void *q, *out;
    float *lse;
    cpa_bench_score score;
    int64_t *tile_counts; /* on the device; NULL: no tile is left out */
} attend_state;

/* Writes one copy of the cache, of blocks as the engine has them, and repeats it. */
static cpa_status make_cache(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const cpa_attention_shape shape = cpa_bench_shape(o);
    const cpa_block_layout layout = cpa_block_layout_of(&shape, (int32_t)o->block_size);
    void *memory = NULL;
    int64_t n = s->work.n_sequences, longest = 0;
    s->tables = calloc((size_t)n + 1, sizeof *s->tables);
    if (!s->tables) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for tables");
    for (int64_t i = 0; i < n; i++) {
        s->tables[i + 1] = s->tables[i] + (s->work.lengths[i] + o->block_size - 1) / o->block_size;
        longest = cpa_max64(longest, s->work.lengths[i]);
    }
    s->cache_bytes = s->tables[n] * layout.bytes;
    s->copies = cpa_bench_copies(s->site, s->cache_bytes);
    CPA_TRY(cpa_bench_poisoned(s->site, s->cache_bytes * s->copies, &memory, err));
    s->kv = cpa_block_layout_view(&layout, memory, s->tables[n] * s->copies, 0);
    CPA_TRY(cpa_bench_block_order(o, s->tables[n], &s->block_tables, err));
    int64_t *positions = cpa_bench_positions(0, longest);
    cpa_status status = positions ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for positions");
    for (int64_t i = 0; status == CPA_OK && i < n; i++) {
        const int64_t shared = cpa_bench_shared_tokens(o, &s->work, i), entries = shared / o->block_size;
        int32_t *table = s->block_tables + s->tables[i];
        memcpy(table, s->block_tables, (size_t)entries * sizeof *table);
        status = cpa_bench_fill_cache(s->site, i, positions + shared, s->work.lengths[i] - shared, table + entries,
                                      &s->kv, err);
    }
    free(positions);
    CPA_TRY(status);
    return cpa_bench_replicate(s->site, memory, s->cache_bytes, s->cache_bytes * s->copies, err);
}

/* The cache moves to page-locked memory of the host, and a ring of a part of it takes its place. */
static cpa_status offload_cache(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t bytes = s->cache_bytes * s->copies;
    void *host;
    cpa_kv_ring_options ring = {.size = sizeof ring,
                                .shape = cpa_bench_shape(o),
                                .block_size = (int32_t)o->block_size,
                                .segments = (int32_t)o->segments};
    ring.bytes = cpa_max64(s->cache_bytes / o->ring_part, cpa_kv_ring_least_bytes(s->site->device, &ring));
    CPA_TRY(s->site->device->table->alloc_host(s->site->device, bytes, &host, err));
    const cpa_status status = cpa_bench_copy(s->site, host, s->kv.k, bytes, err);
    cpa_device_free(s->site->device, s->kv.k);
    if (!s->kv.v_in_k) s->kv.v = (char *)host + ((char *)s->kv.v - (char *)s->kv.k);
    s->kv.k = host;
    s->is_on_host = 1;
    CPA_TRY(status);
    return cpa_kv_ring_create(s->site->device, &ring, &s->ring, err);
}

static cpa_status make_rows(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    int64_t head_rows = s->work.rows * o->q_heads, element = cpa_dtype_bytes((cpa_dtype)o->dtype);
    CPA_TRY(cpa_device_alloc(s->site->device, head_rows * o->k_dim * element, &s->q, err));
    CPA_TRY(cpa_bench_poisoned(s->site, head_rows * o->v_dim * element, &s->out, err));
    CPA_TRY(cpa_bench_poisoned(s->site, head_rows * (int64_t)sizeof *s->lse, (void **)&s->lse, err));
    cpa_status status = CPA_OK;
    for (int64_t i = 0; status == CPA_OK && i < s->work.n_pieces; i++) {
        const cpa_bench_piece *piece = &s->work.pieces[i];
        int64_t *positions = cpa_bench_positions(piece->first, piece->count);
        char *q = (char *)s->q + piece->row * o->q_heads * o->k_dim * element;
        status = positions
                     ? cpa_bench_synthesize(s->site, CPA_SYNTH_Q, piece->sequence, positions, piece->count, q, err)
                     : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for positions");
        free(positions);
    }
    return status;
}

/* Plans the pieces of a step, in place of a plan of the device where there is a ring. */
static cpa_status make_plan(attend_state *s, int64_t step, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const cpa_bench_piece *pieces = s->work.pieces + s->work.steps[step];
    int64_t n = s->work.steps[step + 1] - s->work.steps[step];
    cpa_attend_item *items = calloc((size_t)n, sizeof *items);
    if (!items) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for items");
    for (int64_t i = 0; i < n; i++) {
        items[i] = (cpa_attend_item){
            .q_row = pieces[i].row,
            .q_count = pieces[i].count,
            .q_first = pieces[i].first,
            .k_count = pieces[i].first + pieces[i].count,
            .table = s->tables[pieces[i].sequence],
        };
    }
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {.cp_size = 1, .interleave = (int32_t)o->block_size},
        .shape = cpa_bench_shape(o),
        .block_size = (int32_t)o->block_size,
        .items = items,
        .n_items = n,
        .block_tables = s->block_tables,
        .n_table_entries = s->tables[s->work.n_sequences],
        .cascade_attention = (cpa_cascade_attention)o->cascade,
    };
    cpa_status status;
    if (s->ring) {
        CPA_TRY_GOTO(cpa_ring_plan_create(s->ring, &s->ring_plan, err), done);
        CPA_TRY_GOTO(cpa_ring_plan_set(s->ring_plan, &batch, err), done);
    }
    status = cpa_attend_plan_create(s->site->device, &s->plans[step], err);
    if (status == CPA_OK) status = cpa_attend_plan_set(s->plans[step], &batch, err);
    if (status == CPA_OK && o->padded) {
        const cpa_attend_fusion fusion = {.padded_items = s->plans[step]->rows_attended};
        status = s->site->device->operators->plan_set(s->plans[step], &batch, fusion, err);
    }
done:
    free(items);
    return status;
}

static cpa_status make_plans(attend_state *s, cpa_error *err) {
    s->plans = calloc((size_t)s->work.n_steps, sizeof(cpa_attend_plan *));
    if (!s->plans) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for plans");
    for (int64_t i = 0; i < s->work.n_steps; i++) CPA_TRY(make_plan(s, i, err));
    return CPA_OK;
}

/* Multiply-adds of Q K^T and P V over the pairs that the mask shows, and every operand of a piece moved once, those
 * that pieces share once in all. */
static void count_work(const attend_state *s, cpa_bench_row *row) {
    const cpa_bench_options *o = &s->site->options;
    double widths = (double)(o->k_dim + o->v_dim);
    double q_bytes = widths * (double)(o->q_heads * cpa_dtype_bytes((cpa_dtype)o->dtype));
    const cpa_attention_shape shape = cpa_bench_shape(o);
    double kv_bytes = 0;
    for (int part = CPA_KEYS; part <= CPA_VALUES - shape.v_in_k; part++)
        kv_bytes +=
            (double)(o->kv_heads * (cpa_shape_row_bytes(&shape, (cpa_kv_part)part) +
                                    cpa_kv_scale_bytes(shape.kv_dtype, (cpa_kv_part)part, (float)o->tensor_scale)));
    row->flops = row->bytes = 0;
    for (int64_t i = 0; i < s->work.n_pieces; i++) {
        double first = (double)s->work.pieces[i].first, t = (double)s->work.pieces[i].count;
        double pairs = o->full ? t * (first + t) : t * first + 0.5 * t * (t + 1);
        row->flops += 2.0 * widths * (double)o->q_heads * pairs;
        const double shared = (double)cpa_bench_shared_tokens(o, &s->work, s->work.pieces[i].sequence);
        row->bytes += (first + t - shared) * kv_bytes + t * q_bytes;
    }
}

/* What a call attends with. */
static cpa_attend_args args_of(attend_state *s, int64_t call) {
    const int64_t copy = call % s->copies;
    cpa_kv_view kv = s->kv;
    kv.num_blocks /= s->copies;
    kv.k = (char *)kv.k + copy * s->cache_bytes;
    if (!kv.v_in_k) kv.v = (char *)kv.v + copy * s->cache_bytes;
    cpa_attend_args args = {
        .size = sizeof args,
        .q = s->q,
        .q_dtype = (cpa_dtype)s->site->options.dtype,
        .kv = kv,
        .mask = {.causal = !s->site->options.full && !s->score.device.bits.bits},
        .scale = cpa_bench_scale(&s->site->options),
        .state = {.lse = s->lse, .lse_row_stride = s->site->options.q_heads},
        .out = s->out,
        .skip_tiles = (float)s->site->options.skip_tiles,
        .tile_counts = s->tile_counts,
    };
    if (s->site->options.rules != CPA_BENCH_NO_RULE || s->site->options.density > 0)
        cpa_case_score_set(&s->score.device, &args);
    return args;
}

/* Notes a kernel that runs, once, and the first reason for one that is not the fastest. */
static void note_kernel(const cpa_attend_kernel *kernel, cpa_bench_row *row) {
    int i = 0;
    if (!kernel->name) return;
    while (i < CPA_BENCH_MOST_KERNELS && row->kernels[i] && strcmp(row->kernels[i], kernel->name) != 0) i++;
    if (i < CPA_BENCH_MOST_KERNELS) row->kernels[i] = kernel->name;
    if (!row->why) row->why = kernel->why;
}

cpa_status cpa_bench_note_kernels(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_bench_row *row,
                                  cpa_error *err) {
    cpa_attend_kernels kernels;
    CPA_TRY(cpa_attend_plan_kernel(plan, args, &kernels, sizeof kernels, err));
    note_kernel(&kernels.decode, row);
    note_kernel(&kernels.shared, row);
    note_kernel(&kernels.prefill, row);
    return CPA_OK;
}

cpa_status cpa_bench_use_path(cpa_bench_site *site, cpa_error *err) {
    const char *wanted = cpa_bench_paths[site->options.path], *path;
    for (int32_t i = 0; (path = site->device->self_test->attend_path(site->device, i)); i++) {
        if (site->options.path == 0 || strcmp(path, wanted) == 0) return CPA_OK;
    }
    (void)site->device->self_test->attend_path(site->device, 0);
    return cpa_fail(err, CPA_UNSUPPORTED, "bench attend: kernels=%s: %s has none, expected a CUDA device that has",
                    wanted, cpa_device_description(site->device));
}

typedef cpa_status (*make_work_fn)(const cpa_bench_options *options, const int64_t *shape, cpa_bench_attend_work *out,
                                   cpa_error *err);

static cpa_status prepare(cpa_bench_site *site, make_work_fn make_work, int offloads, const int64_t *shape,
                          cpa_bench_row *row, void **state, cpa_error *err) {
    attend_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory");
    *state = s;
    s->site = site;
    CPA_TRY(make_work(&site->options, shape, &s->work, err));
    CPA_TRY(cpa_bench_use_path(site, err));
    count_work(s, row);
    CPA_TRY(make_cache(s, err));
    if (offloads) CPA_TRY(offload_cache(s, err));
    CPA_TRY(make_rows(s, err));
    CPA_TRY(cpa_bench_score_make(site, &s->work, &s->score, err));
    row->flops *= s->score.selected;
    CPA_TRY(make_plans(s, err));
    if (site->options.skip_tiles > 0)
        CPA_TRY(cpa_bench_upload(site, row->tiles, sizeof row->tiles, (void **)&s->tile_counts, err));
    const cpa_attend_args args = args_of(s, 0);
    for (int64_t i = 0; i < s->work.n_steps; i++) CPA_TRY(cpa_bench_note_kernels(s->plans[i], &args, row, err));
    return CPA_OK;
}

static cpa_status prepare_equal(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                cpa_error *err) {
    return prepare(site, cpa_bench_attend_work_equal, 0, shape, row, state, err);
}

static cpa_status prepare_varlen(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    return prepare(site, cpa_bench_attend_work_varlen, 0, shape, row, state, err);
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    attend_state *s = state;
    const cpa_attend_args args = args_of(s, call);
    if (s->ring) return cpa_bench_enqueued(s->site, cpa_ring_attend(s->ring_plan, &args, s->site->stream), err);
    for (int64_t i = 0; i < s->work.n_steps; i++) {
        CPA_TRY(cpa_bench_enqueued(s->site, cpa_attend(s->plans[i], &args, s->site->stream), err));
    }
    return CPA_OK;
}

/* What a call reads of the host is what its copies count. */
static cpa_status prepare_offload(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                  cpa_error *err) {
    cpa_kv_ring_stats stats;
    CPA_TRY(prepare(site, cpa_bench_attend_work_equal, 1, shape, row, state, err));
    attend_state *s = *state;
    CPA_TRY(run(s, 0, err));
    CPA_TRY(cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err));
    CPA_TRY(cpa_kv_ring_get_stats(s->ring, &stats, sizeof stats));
    row->bytes = (double)stats.bytes_read;
    return CPA_OK;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    attend_state *s = state;
    const cpa_bench_attend_check_args args = {
        .work = &s->work, .out = s->out, .lse = s->lse, .score = &s->score.checked};
    if (s->tile_counts) CPA_TRY(cpa_bench_copy(s->site, row->tiles, s->tile_counts, sizeof row->tiles, err));
    return cpa_bench_attend_check(s->site, &args, &row->checked, &row->wrong, err);
}

static void release(void *state) {
    attend_state *s = state;
    if (!s) return;
    cpa_ring_plan_destroy(s->ring_plan);
    cpa_kv_ring_destroy(s->ring);
    for (int64_t i = 0; s->plans && i < s->work.n_steps; i++) cpa_attend_plan_destroy(s->plans[i]);
    free(s->plans);
    cpa_case_score_free(&s->score.device, s->site->device);
    cpa_case_score_release(&s->score.host);
    cpa_device_free(s->site->device, s->tile_counts);
    cpa_device_free(s->site->device, s->lse);
    cpa_device_free(s->site->device, s->out);
    cpa_device_free(s->site->device, s->q);
    free(s->block_tables);
    free(s->tables);
    if (s->is_on_host)
        s->site->device->table->free_host(s->site->device, s->kv.k);
    else
        cpa_device_free(s->site->device, s->kv.k);
    cpa_bench_attend_work_release(&s->work);
    free(s);
}

const cpa_bench cpa_bench_attend = {
    .name = "attend",
    .dims = "sequences x new tokens x context",
    .n_dims = 3,
    .shapes_host = "1x1Kx1K,1x2Kx2K,1x8Kx8K,4x1x64K,1x1x16K:v-in-k=true:q-heads=16:dtype=bf16",
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
        "64x1x16K:head-dim=256,"
        "64x1x16K:v-in-k=true:q-heads=16,64x1x16K:v-in-k=true:q-heads=128",
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_equal,
    .run = run,
    .check = check,
    .release = release,
};

const cpa_bench cpa_bench_offload = {
    .name = "offload",
    .dims = "sequences x new tokens x context",
    .n_dims = 3,
    .shapes_host = "1x1x16K,1x64x16K:ring-part=16,1x256x16K:ring-part=16:density=20",
    .shapes_cuda =
        "1x16Kx128K,1x128Kx128K,1x1x128K,16x1x128K,64x1x16K,"
        "1x16Kx128K:density=10,1x16Kx128K:density=20,1x16Kx128K:density=50",
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_LINK,
    .prepare = prepare_offload,
    .run = run,
    .check = check,
    .release = release,
};

const cpa_bench cpa_bench_varlen = {
    .name = "varlen",
    .dims = "requests x tokens of a step",
    .n_dims = 2,
    .shapes_host = "8x256:length-scale=0.02,8x256:length-scale=0.02:as-one=true",
    .shapes_cuda = "64x8K,64x8K:as-one=true",
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_varlen,
    .run = run,
    .check = check,
    .release = release,
};
