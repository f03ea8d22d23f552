#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/struct_size.h"
#include "comm/links.h"
#include "src/cache/kv_cache.h"
#include "src/check/self_test.h"
#include "src/check/self_test_kernels.h"
#include "src/context/transport_choice.h"
#include "src/engine/calibrate.h"
#include "src/engine/engine_internal.h"
#include "src/engine/engine_options.h"
#include "src/engine/engine_requests.h"
#include "src/engine/engine_run.h"
#include "src/engine/engine_stats.h"
#include "src/engine/head_scales.h"
#include "src/engine/model_forms.h"
#include "src/engine/restore_blocks.h"
#include "src/ops/check_shape.h"

static cpa_worker_options worker_options(const cpa_engine *engine) {
    const cpa_engine_options *o = &engine->options;
    return (cpa_worker_options){
        .model = o->model,
        .map = {engine->control.size, o->interleave},
        .block_size = o->block_size,
        .groups = engine->groups,
        .max_tokens = o->max_num_batched_tokens,
        .max_seqs = o->max_num_seqs,
        .enforce_eager = o->enforce_eager,
        .cascade_attention = engine->options.cascade_attention,
        .state_dtype = o->state_dtype,
        .sparse_stride = o->sparse_stride,
        .sparse_tau = o->sparse_tau,
        .skip_tiles = o->skip_tiles,
        .absorb_prompts = o->short_prompts == CPA_SHORT_PROMPTS_ABSORB ||
                          (o->short_prompts == CPA_SHORT_PROMPTS_AUTO && !engine->device->caps.bit_exact),
        .staging_bytes = o->staging_bytes,
        .ring_bytes = o->ring_bytes,
        .ring_segments = o->ring_segments,
        .transport = engine->transport,
        .store = o->block_store ? &engine->store : NULL,
    };
}

/* How fast blocks get to host memory, where there is any for them. */
static cpa_status measure_swap(cpa_engine *engine, cpa_error *err) {
    if (engine->groups.list[0].host_blocks == 0 || engine->control.rank != 0) return CPA_OK;
    return cpa_kv_tier_bandwidth(engine->device, &engine->host_bandwidth, err);
}

/* C and W measured here stand in every rank's planner; rank 0 uses it. */
static cpa_status make_planner(cpa_engine *engine, cpa_error *err) {
    cpa_worker_options worker = worker_options(engine);
    cpa_planner planner = cpa_engine_planner(&engine->options, engine->control.size);
    CPA_TRY(cpa_calibrate(&engine->control, engine->device, &worker, &planner, engine->links, err));
    engine->planner = planner;
    return CPA_OK;
}

static cpa_status self_test(cpa_engine *engine, cpa_error *err) {
    if (engine->options.skip_self_test) return CPA_OK;
    cpa_worker_options worker = worker_options(engine);
    cpa_self_test_kernels_stats kernels;
    cpa_status status = cpa_self_test_kernels(engine->device, &worker, engine->options.seed, &kernels, err);
    CPA_TRY(cpa_control_agree(&engine->control, status, err));
    cpa_log(CPA_LOG_INFO, "self-test passed: kernels, %d path%s of attend against %s, %lld rows on this rank%s%s",
            kernels.paths, kernels.paths == 1 ? "" : "s", kernels.on_blas ? "an unfused fp32 BLAS" : "float64",
            (long long)kernels.rows, kernels.why[0] ? "; " : "", kernels.why);
    int64_t rows = 0;
    CPA_TRY(cpa_self_test(&engine->control, engine->device, &worker, engine->options.seed, &rows, err));
    cpa_log(CPA_LOG_INFO, "self-test passed: pass-kv and pass-q against float64, %lld rows on this rank",
            (long long)rows);
    return CPA_OK;
}

/* What rank 0 alone has. */
static cpa_status make_scheduler(cpa_engine *engine, cpa_error *err) {
    if (engine->control.rank != 0) return CPA_OK;
    engine->totals = calloc((size_t)engine->control.size, sizeof *engine->totals);
    engine->published->totals = calloc((size_t)engine->control.size, sizeof *engine->totals);
    if (!engine->totals || !engine->published->totals) return cpa_fail(err, CPA_NO_MEMORY, "engine: no memory");
    const cpa_engine_options *o = &engine->options;
    if (o->timeline_spans > 0)
        CPA_TRY(cpa_request_spans_create(o->timeline_spans, o->max_num_seqs, &engine->request_spans, err));
    char identity[CPA_IDENTITY_BYTES];
    cpa_scheduler_options options =
        cpa_engine_scheduler_options(&engine->options, &engine->groups, engine->planner, engine->scales_hash, identity);
    options.host_bandwidth = engine->host_bandwidth;
    options.model = engine->store.model;
    if (o->drafter == CPA_DRAFT_MODEL) {
        options.drafting.draft = engine->network.draft;
        options.drafting.draft_end = engine->network.draft_end;
        options.drafting.ctx = engine->network.ctx;
    }
    CPA_TRY(cpa_scheduler_create(&options, &engine->scheduler, err));
    return cpa_inbox_create(engine->scheduler, engine->options.max_queued_requests, engine->options.max_queued_tokens,
                            &engine->inbox, err);
}

/* What joins the ranks, without the rates. */
static cpa_status find_links(cpa_engine *engine, cpa_error *err) {
    const size_t ranks = (size_t)engine->control.size;
    engine->links = calloc(ranks * ranks, sizeof *engine->links);
    const cpa_status status = engine->links ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "engine: no memory");
    CPA_TRY(cpa_control_agree(&engine->control, status, err));
    return cpa_links_find(&engine->control, engine->options.device.backend, engine->links, err);
}

/* Scales of heads come to the device. */
static cpa_status take_scales(cpa_engine *engine, cpa_error *err) {
    engine->scales_hash = cpa_head_scales_hash(&engine->options);
    return cpa_head_scales_upload(&engine->options, engine->device, &engine->options.model.attention,
                                  &engine->head_scales, err);
}

/* Whether the device attends every layer. */
static cpa_status check_layers(const cpa_engine *engine, cpa_error *err) {
    const cpa_model_shape *model = &engine->options.model;
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_mask mask = cpa_model_mask(model, layer);
        CPA_TRY(cpa_check_attend("model", engine->device, &model->attention, &mask, err));
    }
    return CPA_OK;
}

static cpa_status make_worker(cpa_engine *engine, cpa_error *err) {
    cpa_control *control = &engine->control;
    cpa_worker_options worker = worker_options(engine);
    char identity[CPA_FOLDER_IDENTITY_BYTES];
    cpa_status status =
        cpa_engine_describe_folder(&engine->options, engine->scales_hash, control->rank, control->size, identity, err);
    CPA_TRY(cpa_control_agree(control, status, err));
    worker.disk_folder = engine->options.swap_folder;
    worker.disk_identity = identity;
    return cpa_worker_create(control, engine->device, &engine->network, &worker, &engine->worker, err);
}

/* The steps of cpa_engine_create after the control channel; each is collective or agreed on. */
static cpa_status create_parts(cpa_engine *engine, cpa_error *err) {
    cpa_control *control = &engine->control;
    const cpa_engine_options *o = &engine->options;
    CPA_TRY(cpa_control_agree(control, cpa_device_open(&o->device, &engine->device, err), err));
    CPA_TRY(cpa_control_agree(control, take_scales(engine, err), err));
    CPA_TRY(cpa_control_agree(control, check_layers(engine, err), err));
    CPA_TRY(cpa_transport_for(control, engine->device, o->transport, &engine->transport, err));
    CPA_TRY(find_links(engine, err));
    engine->synthetic = (cpa_synthetic){.device = engine->device, .shape = o->model.attention, .seed = o->seed};
    engine->network = cpa_synthetic_model(&engine->synthetic);
    if (o->network) {
        CPA_TRY(CPA_STRUCT_TAKE("network", o->network, cpa_model, layer_in, &engine->network, err));
    } else {
        CPA_TRY(
            cpa_control_agree(control, cpa_synthetic_take_forms(&engine->synthetic, &engine->options.model, err), err));
    }
    if (o->block_store)
        CPA_TRY(CPA_STRUCT_TAKE("block_store", o->block_store, cpa_block_store, get, &engine->store, err));
    engine->groups = cpa_engine_groups(o, control->size);
    CPA_TRY(cpa_control_agree(control, cpa_engine_check_room(o, &engine->groups, err), err));
    CPA_TRY(self_test(engine, err));
    CPA_TRY(make_planner(engine, err));
    CPA_TRY(cpa_control_agree(control, measure_swap(engine, err), err));
    CPA_TRY(make_worker(engine, err));
    engine->timeline.limit = o->timeline_spans;
    if (o->timeline_spans > 0) cpa_worker_set_timeline(engine->worker, &engine->timeline);
    cpa_status status = CPA_OK;
    if (o->verify != 0) {
        status = cpa_verify_create(control, engine->worker, o->verify, o->seed, &o->device, &engine->verify, err);
        if (status == CPA_OK) status = cpa_verify_keep_violations(engine->verify, o->violation_dump, err);
    }
    if (status == CPA_OK) status = make_scheduler(engine, err);
    CPA_TRY(cpa_control_agree(control, status, err));
    return o->swap_folder ? cpa_engine_restore_blocks(engine, err) : CPA_OK;
}

/* Transfers follow from the masks. */
static uint64_t hash_masks(const cpa_model_shape *model) {
    uint64_t hash = CPA_HASH_START;
    for (int32_t i = 0; model->layer_masks && i < model->layers; i++) {
        const cpa_mask *mask = &model->layer_masks[i];
        const int64_t same[] = {mask->causal, mask->window, mask->sinks};
        hash = cpa_hash_bytes(hash, same, sizeof same);
    }
    return hash;
}

/* What every rank computes with, or takes part in. What rank 0 alone plans with is its own. */
static cpa_status agree_on_options(cpa_engine *engine, cpa_error *err) {
    const cpa_engine_options *o = &engine->options;
    const cpa_attention_shape *s = &o->model.attention;
    const uint64_t masks = hash_masks(&o->model), rules = cpa_engine_hash_rules(&o->model);
    const uint64_t forms = cpa_model_forms_hash(&o->model), scales = cpa_head_scales_hash(o);
    const uint64_t unquantised = cpa_engine_hash_unquantised(&o->model);
    cpa_model network = {.size = 0};
    if (o->network) CPA_TRY(CPA_STRUCT_TAKE("network", o->network, cpa_model, layer_in, &network, err));
    const cpa_named_value values[] = {
        {"layers", o->model.layers},
        {"draft_layers", o->model.draft_layers},
        {"q_heads", s->q_heads},
        {"kv_heads", s->kv_heads},
        {"k_dim", s->k_dim},
        {"v_dim", s->v_dim},
        {"v_in_k", s->v_in_k},
        {"dtype", s->dtype},
        {"kv_dtype", s->kv_dtype},
        {"k_scale", s->k_scale},
        {"v_scale", s->v_scale},
        {"n_scales", s->n_scales},
        {"scales_on_host", o->scales_on_host},
        {"scales, a hash", (double)(scales >> 16)},
        {"unquantised_layers, a hash", (double)(unquantised >> 16)},
        {"precise_tokens", (double)o->precise_tokens},
        {"causal", o->model.mask.causal},
        {"window", (double)o->model.mask.window},
        {"sinks", o->model.mask.sinks},
        {"layer_masks", o->model.layer_masks != NULL},
        {"layer_masks, upper half of a hash", (double)(masks >> 32)},
        {"layer_masks, lower half of a hash", (double)(masks & UINT32_MAX)},
        {"layer_rules, upper half of a hash", (double)(rules >> 32)},
        {"layer_rules, lower half of a hash", (double)(rules & UINT32_MAX)},
        {"forms, upper half of a hash", (double)(forms >> 32)},
        {"forms, lower half of a hash", (double)(forms & UINT32_MAX)},
        {"network", o->network != NULL},
        {"network.end_step", network.end_step != NULL},
        {"network.capturable", network.capturable},
        {"network.slices", network.slices},
        {"network.select", network.select != NULL},
        {"network.select_width", network.select_width},
        {"preemption", o->preemption},
        {"fail_on_nonfinite", o->fail_on_nonfinite},
        {"device.backend", o->device.backend},
        {"block_size", o->block_size},
        {"num_blocks", (double)o->num_blocks},
        {"interleave", o->interleave},
        {"max_num_batched_tokens", (double)o->max_num_batched_tokens},
        {"max_num_seqs", o->max_num_seqs},
        {"window_seqs", o->window_seqs},
        {"algorithm", o->algorithm},
        {"staging_bytes", (double)o->staging_bytes},
        {"ring_bytes", (double)o->ring_bytes},
        {"ring_segments", o->ring_segments},
        {"state_dtype", o->state_dtype},
        {"short_prompts", o->short_prompts},
        {"verify", o->verify},
        {"skip_tiles", (double)o->skip_tiles},
        {"skip_self_test", o->skip_self_test},
        {"enforce_eager", o->enforce_eager},
        {"seed, upper half", (double)(o->seed >> 32)},
        {"seed, lower half", (double)(o->seed & UINT32_MAX)},
        {"swap_bytes", (double)o->swap_bytes},
        {"transport", o->transport},
        {"timeline_spans", o->timeline_spans > 0},
        {"block_store", o->block_store != NULL},
        {"keep_evicted", o->keep_evicted},
        {"swap_folder", o->swap_folder != NULL},
        {"swap_folder_bytes", (double)o->swap_folder_bytes},
    };
    _Static_assert(sizeof values / sizeof values[0] <= CPA_SAME_MOST, "all are compared at once");
    return cpa_control_same(&engine->control, "engine", values, sizeof values / sizeof values[0], err);
}

/* An engine of nothing; NULL without memory. */
static cpa_engine *allocate(void) {
    static atomic_ullong made;
    cpa_engine *engine = calloc(1, sizeof *engine);
    if (engine) engine->published = calloc(1, sizeof *engine->published);
    if (!engine || !engine->published) {
        free(engine);
        return NULL;
    }
    pthread_mutex_init(&engine->published->lock, NULL);
    engine->serial = atomic_fetch_add(&made, 1) + 1;
    return engine;
}

static void release(cpa_engine *engine) {
    pthread_mutex_destroy(&engine->published->lock);
    free(engine->published->totals);
    free(engine->published);
    free(engine->totals);
    free(engine->links);
    free(engine);
}

cpa_status cpa_engine_create(cpa_comm *comm, const cpa_engine_options *options, cpa_engine **out, cpa_error *err) {
    cpa_error own = {CPA_OK, ""};
    cpa_control control;
    CPA_TRY(cpa_control_open(comm, &control, err));
    cpa_engine *engine = allocate();
    cpa_status status = engine ? CPA_OK : cpa_fail(&own, CPA_NO_MEMORY, "engine: no memory");
    if (engine) status = cpa_engine_resolve(options, &engine->options, &own);
    if (status == CPA_OK && !out) status = cpa_fail(&own, CPA_INVALID, "engine: out is NULL");
    status = cpa_control_agree(&control, status, &own);
    if (!engine) {
        cpa_control_close(&control);
        if (err) *err = own;
        return status;
    }
    engine->control = control;
    if (status == CPA_OK) status = agree_on_options(engine, &own);
    if (status == CPA_OK) status = create_parts(engine, &own);
    if (status != CPA_OK) {
        if (cpa_control_all_failed(&engine->control)) cpa_engine_destroy(engine);
        if (err) *err = own;
        return status;
    }
    cpa_engine_describe_groups(&engine->groups, &engine->stats);
    cpa_engine_publish_stats(engine, NULL);
    *out = engine;
    return CPA_OK;
}

void cpa_engine_destroy(cpa_engine *engine) {
    if (!engine) return;
    if (atomic_load(&engine->running)) {
        cpa_log(CPA_LOG_ERROR, "cpa_engine_destroy: called while cpa_engine_run is under way, and not carried out");
        return;
    }
    cpa_engine_end_steps(engine);
    cpa_inbox_destroy(engine->inbox);
    cpa_scheduler_destroy(engine->scheduler);
    cpa_verify_destroy(engine->verify);
    cpa_worker_destroy(engine->worker);
    cpa_request_spans_destroy(engine->request_spans);
    cpa_timeline_destroy(&engine->timeline);
    cpa_synthetic_free(&engine->synthetic);
    if (engine->device) engine->device->table->free(engine->device, engine->head_scales);
    cpa_device_close(engine->device);
    cpa_control_close(&engine->control);
    release(engine);
}

cpa_status cpa_engine_timeline(cpa_engine *engine, cpa_span_fn on_span, void *ctx) {
    if (!engine) return CPA_INVALID;
    cpa_status status = cpa_timeline_gather(&engine->timeline, &engine->control, on_span, ctx, &engine->error);
    if (status == CPA_OK && engine->request_spans && on_span)
        cpa_timeline_hand_over(&engine->request_spans->timeline, engine->control.rank, on_span, ctx);
    return cpa_engine_outcome(engine, status, &engine->error);
}

cpa_status cpa_engine_bytes_between(cpa_engine *engine, int64_t *bytes) {
    if (!engine) return CPA_INVALID;
    cpa_control *control = &engine->control;
    cpa_status status = CPA_OK;
    if (control->rank == 0 && !bytes) status = cpa_fail(&engine->error, CPA_INVALID, "engine: bytes is NULL");
    status = cpa_control_agree(control, status, &engine->error);
    if (status == CPA_OK)
        status = cpa_control_gather(control, cpa_context_bytes_to(engine->worker->context),
                                    control->size * (int64_t)sizeof *bytes, bytes, 0, &engine->error);
    return cpa_engine_outcome(engine, status, &engine->error);
}

cpa_status cpa_engine_links(const cpa_engine *engine, cpa_link *links) {
    if (!engine || !links) return CPA_INVALID;
    const size_t ranks = (size_t)engine->control.size;
    memcpy(links, engine->links, ranks * ranks * sizeof *links);
    return CPA_OK;
}

const char *cpa_engine_transport(const cpa_engine *engine) {
    return engine ? cpa_links_carrier(engine->transport, engine->control.comm) : "";
}

const char *cpa_engine_device(const cpa_engine *engine) {
    return engine ? cpa_device_description(engine->device) : "";
}

double cpa_engine_estimate(const cpa_engine *engine, int64_t tokens) {
    if (!engine) return 0;
    const cpa_model_shape *m = &engine->options.model;
    double flops = 1.0 * (double)tokens * (double)tokens * m->attention.q_heads *
                   (m->attention.k_dim + m->attention.v_dim) * m->layers;
    return flops / (engine->planner.flops * engine->control.size);
}
