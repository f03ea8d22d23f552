#include "src/check/self_test_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/varlen.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/check/reference.h"
#include "src/check/self_test_pages.h"
#include "src/check/self_test_results.h"
#include "src/check/self_test_rules.h"

/* Tokens of the sequence, two blocks at least: where the reference runs on a device, enough for prefill to split the
 * keys of a shard, in pieces of 1024. */
enum { DEVICE_TOKENS = 2501, HOST_TOKENS = 401 };
enum { MOST_EMPTY = 2 }; /* states of nothing in a merge */

static cpa_status make_plans(cpa_kernel_test *t, int64_t prefill, cpa_error *err) {
    for (int32_t s = 0; s < CPA_SELF_TEST_SHARDS; s++) {
        cpa_attend_item items[1 + CPA_SELF_TEST_DECODE_ROWS];
        for (int64_t i = 0; i < 1 + CPA_SELF_TEST_DECODE_ROWS; i++) {
            int64_t row = i == 0 ? 0 : prefill + i - 1;
            items[i] = (cpa_attend_item){
                .q_row = row,
                .q_count = i == 0 ? prefill : 1,
                .q_first = i == 0 ? t->keys[0] - prefill : t->keys[0] - CPA_SELF_TEST_DECODE_ROWS + i - 1,
                .k_count = s == 0 ? t->keys[0] : t->limits[row],
                .table = t->first_entry[s],
                .k_set = {CPA_TOKENS_SHARD, s}};
        }
        cpa_attend_batch batch = {.size = sizeof batch,
                                  .map = t->map,
                                  .shape = t->options->model.attention,
                                  .block_size = t->options->block_size,
                                  .items = items,
                                  .n_items = 1 + CPA_SELF_TEST_DECODE_ROWS,
                                  .block_tables = t->tables,
                                  .n_table_entries = t->n_blocks - CPA_SELF_TEST_SPARE_BLOCKS};
        CPA_TRY(cpa_attend_plan_create(t->device, &t->plans[s], err));
        CPA_TRY(cpa_attend_plan_set(t->plans[s], &batch, err));
    }
    return CPA_OK;
}

/* What the reference on the device reads and writes. */
static cpa_status make_blas(cpa_kernel_test *t, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t n = cpa_self_test_total_keys(t), element = (int64_t)sizeof(float), index = (int64_t)sizeof(int64_t);
    const int64_t heads = t->rows * shape->q_heads;
    if (!t->device->caps.has_reference) return CPA_OK;
    cpa_error own = {CPA_OK, ""};
    cpa_status status = t->device->self_test->reference_open(t->device, &t->blas, &own);
    if (status == CPA_UNSUPPORTED) {
        snprintf(t->stats->why, sizeof t->stats->why, "%.199s", own.message);
        return CPA_OK;
    }
    if (status != CPA_OK) return cpa_fail(err, status, "%s", own.message);
    t->stats->on_blas = 1;
    CPA_TRY(cpa_self_test_device(t, heads * shape->k_dim * element, t->q, &t->q_wide, err));
    CPA_TRY(cpa_self_test_device(t, n * shape->kv_heads * shape->k_dim * element, t->k, &t->k_wide, err));
    CPA_TRY(cpa_self_test_device(t, n * shape->kv_heads * shape->v_dim * element, t->v, &t->v_wide, err));
    CPA_TRY(cpa_self_test_device(t, n * index, t->k_positions, &t->k_positions_device, err));
    CPA_TRY(cpa_self_test_device(t, t->rows * index, t->q_positions, &t->q_positions_device, err));
    CPA_TRY(cpa_self_test_device(t, t->rows * index, t->limits, &t->limits_device, err));
    CPA_TRY(cpa_self_test_device(t, heads * shape->v_dim * element, NULL, &t->ref_o, err));
    CPA_TRY(cpa_self_test_device(t, heads * shape->v_dim * element, NULL, &t->ref_mass, err));
    return cpa_self_test_device(t, heads * element, NULL, &t->ref_lse, err);
}

/* Keys that a row is given: those of shard 1 up to its limit, behind all of shard 0 where `both`. */
static cpa_status expect_on_device(cpa_kernel_test *t, cpa_mask mask, int both) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t heads = t->rows * shape->q_heads, from = both ? 0 : t->keys[0], element = (int64_t)sizeof(float);
    cpa_reference_attend_args args = {.rows = t->rows,
                                      .keys = both ? cpa_self_test_total_keys(t) : t->keys[1],
                                      .shape = *shape,
                                      .q = t->q_wide,
                                      .k = t->k_wide + from * shape->kv_heads * shape->k_dim,
                                      .v = t->v_wide + from * shape->kv_heads * shape->v_dim,
                                      .q_positions = t->q_positions_device,
                                      .k_positions = t->k_positions_device + from,
                                      .limits = t->limits_device,
                                      .limit_base = both ? t->keys[0] : 0,
                                      .mask = mask,
                                      .scale = t->scale,
                                      .o = t->ref_o,
                                      .mass = t->ref_mass,
                                      .lse = t->ref_lse};
    float *mass = (float *)t->got;
    CPA_TRY(t->device->self_test->reference_attend(t->blas, &args, t->stream));
    CPA_TRY(t->device->table->copy(t->want.o, t->ref_o, heads * shape->v_dim * element, t->stream));
    CPA_TRY(t->device->table->copy(t->want.lse, t->ref_lse, heads * element, t->stream));
    CPA_TRY(t->device->table->copy(mass, t->ref_mass, heads * shape->v_dim * element, t->stream));
    CPA_TRY(t->device->table->stream_sync(t->stream));
    for (int64_t i = 0; i < heads; i++) {
        /* Both results are rounded; in fp32 their scores may differ as much as their LSEs. */
        const double of_scores =
            t->coarser == CPA_F32 ? cpa_reference_lse_tolerance(CPA_F32, (double)t->want.lse[i]) : 0;
        float most = 0;
        for (int32_t d = 0; d < shape->v_dim; d++) most = fmaxf(most, mass[i * shape->v_dim + d]);
        const double of_rounding = 2 * (cpa_reference_unit_roundoff(t->coarser) + of_scores);
        t->want.tolerance[i] = (float)((of_rounding + cpa_self_test_rounding(t)) * (double)most + 1e-5);
    }
    return CPA_OK;
}

static cpa_status expect(cpa_kernel_test *t, cpa_mask mask, int both) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    if (t->blas) return expect_on_device(t, mask, both);
    cpa_self_test_expect(t, mask, NULL, both, shape->q_heads / shape->kv_heads);
    return CPA_OK;
}

static cpa_status attend(cpa_kernel_test *t, int32_t shard, cpa_mask mask, int resume, const cpa_self_test_result *r,
                         cpa_error *err) {
    cpa_attend_args args = {.size = sizeof args,
                            .q = t->q_device,
                            .q_dtype = t->options->model.attention.dtype,
                            .kv = t->kv,
                            .mask = mask,
                            .scale = t->scale,
                            .resume = resume,
                            .state = {.o = r->o, .lse = r->lse},
                            .out = r->out};
    cpa_status status = cpa_attend(t->plans[shard], &args, t->stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "attend: %s", t->stream->error.message);
}

/* Merges `count` rows from `first` on: shard 1, nothing so many times (NaN, taken as -inf) and shard 0. */
static cpa_status merge_rows(cpa_kernel_test *t, int64_t first, int64_t count, int32_t n_empty, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t head = first * shape->q_heads, element = head * shape->v_dim;
    cpa_partial states[2 + MOST_EMPTY];
    for (int i = 0; i < 2 + n_empty; i++) {
        const cpa_self_test_result *r = &t->results[i == 0 ? 0 : i == 1 + n_empty ? 1 : 2];
        states[i] = (cpa_partial){.o = r->o + element, .lse = r->lse + head};
    }
    cpa_merge_args args = {.size = sizeof args,
                           .rows = count,
                           .heads = shape->q_heads,
                           .v_dim = shape->v_dim,
                           .states = states,
                           .n_states = 2 + n_empty,
                           .out_dtype = shape->dtype,
                           .out = (char *)t->results[0].out + element * cpa_dtype_bytes(shape->dtype),
                           .out_lse = t->results[1].lse + head,
                           .foreign_lse = 1};
    cpa_status status = cpa_merge(&args, t->stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "merge: %s", t->stream->error.message);
}

/* One mask: every path attends shard 1, merges that with shard 0, the many rows of the prefill apart from the few of
 * decode, and resumes it over shard 0. */
static cpa_status check_mask(cpa_kernel_test *t, cpa_mask mask, int32_t n_empty, cpa_error *err) {
    const int64_t prefill = t->rows - CPA_SELF_TEST_DECODE_ROWS;
    const char *path;
    char what[64];
    for (int both = 0; both < 2; both++) {
        CPA_TRY(expect(t, mask, both));
        for (int32_t p = 0; (path = t->device->self_test->attend_path(t->device, p)); p++) {
            cpa_self_test_result fresh = t->results[0], other = t->results[1], merged = t->results[0];
            t->stats->paths = p + 1;
            snprintf(what, sizeof what, "attend, path %s", path);
            CPA_TRY(attend(t, 1, mask, 0, &fresh, err));
            if (!both) {
                CPA_TRY(cpa_self_test_compare(t, what, mask, &fresh, 0, err));
                CPA_TRY(cpa_self_test_compare(t, what, mask, &fresh, 1, err));
                continue;
            }
            CPA_TRY(attend(t, 0, mask, 0, &other, err));
            CPA_TRY(merge_rows(t, 0, prefill, n_empty, err));
            CPA_TRY(merge_rows(t, prefill, CPA_SELF_TEST_DECODE_ROWS, n_empty, err));
            merged.lse = other.lse;
            snprintf(what, sizeof what, "merge, after path %s", path);
            CPA_TRY(cpa_self_test_compare(t, what, mask, &merged, 1, err));
            fresh.out = NULL;
            snprintf(what, sizeof what, "attend, path %s, resumed", path);
            CPA_TRY(attend(t, 0, mask, 1, &fresh, err));
            CPA_TRY(cpa_self_test_compare(t, what, mask, &fresh, 0, err));
        }
    }
    return CPA_OK;
}

/* Attention without a cache: the rows of prefill against shard 1, a segment in the midst of tensors of all keys. */
static cpa_status check_tensors(cpa_kernel_test *t, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const cpa_mask mask = {.causal = 0};
    const int64_t prefill = t->rows - CPA_SELF_TEST_DECODE_ROWS, all = cpa_self_test_total_keys(t);
    const int64_t q_starts[] = {0, prefill}, k_starts[] = {t->keys[0], all};
    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = shape->q_heads,
                                    .kv_heads = shape->kv_heads,
                                    .k_dim = shape->k_dim,
                                    .v_dim = shape->v_dim,
                                    .n_segments = 1,
                                    .q_starts = q_starts,
                                    .k_starts = k_starts};
    const cpa_self_test_result r = t->results[0];
    const char *path;
    void *k, *v;
    char what[64];
    /* What the cache has of the keys is expected; and tensors have values of their own. */
    if (shape->dtype != shape->kv_dtype || shape->v_in_k) return CPA_OK;
    CPA_TRY(cpa_self_test_device(t, all * cpa_shape_k_bytes(shape), t->k_raw, &k, err));
    CPA_TRY(cpa_self_test_device(t, all * cpa_shape_v_bytes(shape), t->v_raw, &v, err));
    CPA_TRY(expect(t, mask, 0));
    for (int64_t i = prefill * shape->q_heads; i < t->rows * shape->q_heads; i++) t->want.tolerance[i] = -1;
    for (int32_t p = 0; (path = t->device->self_test->attend_path(t->device, p)); p++) {
        const cpa_varlen_attend_args args = {.size = sizeof args,
                                             .dtype = shape->dtype,
                                             .q = t->q_device,
                                             .k = k,
                                             .v = v,
                                             .scale = t->scale,
                                             .state = {.lse = r.lse},
                                             .out = r.out};
        snprintf(what, sizeof what, "varlen, path %s", path);
        CPA_TRY(cpa_varlen_plan_set(t->plans[1], &batch, err));
        const cpa_status status = cpa_varlen_attend(t->plans[1], &args, t->stream);
        if (status != CPA_OK) return cpa_fail(err, status, "varlen: %s", t->stream->error.message);
        CPA_TRY(cpa_self_test_compare(t, what, mask, &r, 1, err));
    }
    return CPA_OK;
}

static cpa_status run(cpa_kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t one_group = 136, groups = 72; /* packed rows of a KV head: more than a tile, and ragged */
    const int64_t prefill = m->attention.q_heads == m->attention.kv_heads ? one_group : groups;
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 0}, {.causal = 1, .window = 50, .sinks = 4}, m->mask};
    const int64_t least = 2 * (int64_t)t->options->block_size;
    const int64_t tokens = cpa_max64(t->device->caps.has_reference ? DEVICE_TOKENS : HOST_TOKENS, least);
    for (int32_t s = 0; s < CPA_SELF_TEST_SHARDS; s++) t->keys[s] = cpa_shard_len(t->map, s, tokens);
    t->rows = prefill + CPA_SELF_TEST_DECODE_ROWS;
    CPA_TRY(t->device->table->stream_create(t->device, &t->stream, err));
    CPA_TRY(cpa_self_test_make_inputs(t, prefill, err));
    CPA_TRY(cpa_self_test_write_pages(t, err));
    CPA_TRY(cpa_self_test_make_results(t, err));
    CPA_TRY(cpa_self_test_check_pages(t, err));
    CPA_TRY(make_plans(t, prefill, err));
    CPA_TRY(make_blas(t, err));
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        int repeated = 0;
        for (size_t j = 0; j < i; j++) repeated |= cpa_mask_equals(masks[i], masks[j]);
        if (!repeated) CPA_TRY(check_mask(t, masks[i], (int32_t)i % (MOST_EMPTY + 1), err));
    }
    CPA_TRY(cpa_self_test_check_rules(t, err));
    return check_tensors(t, err);
}

cpa_status cpa_self_test_kernels(cpa_device *dev, const cpa_worker_options *options, uint64_t seed,
                                 cpa_self_test_kernels_stats *stats, cpa_error *err) {
    const cpa_attention_shape *shape = &options->model.attention;
    cpa_kernel_test t = {
        .device = dev,
        .options = options,
        .stats = stats,
        .seed = seed,
        .map = {CPA_SELF_TEST_SHARDS,
                options->map.interleave < options->block_size ? options->map.interleave : options->block_size},
        .coarser = shape->dtype == CPA_F32 && cpa_dtype_is_plain(shape->kv_dtype) ? shape->kv_dtype : shape->dtype,
        .scale = 1.0f / sqrtf((float)shape->k_dim),
    };
    cpa_error own = {CPA_OK, ""};
    *stats = (cpa_self_test_kernels_stats){0};
    cpa_status status = run(&t, &own);
    if (status != CPA_OK)
        cpa_fail(err, status, "self-test: %s", own.status != CPA_OK ? own.message : t.stream->error.message);
    (void)dev->self_test->attend_path(dev, -1);
    if (t.stream) (void)dev->table->stream_sync(t.stream);
    if (t.blas) dev->self_test->reference_close(t.blas);
    for (int i = 0; i < CPA_SELF_TEST_SHARDS; i++) cpa_attend_plan_destroy(t.plans[i]);
    for (int32_t i = t.n_device - 1; i >= 0; i--) dev->table->free(dev, t.device_memory[i]);
    for (int32_t i = t.n_host - 1; i >= 0; i--) free(t.host_memory[i]);
    if (t.stream) dev->table->stream_destroy(t.stream);
    return status;
}
