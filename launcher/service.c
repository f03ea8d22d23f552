#include "launcher/service.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "comm/limits.h"
#include "launcher/output/timeline_json.h"

cpa_exit_code cpa_service_place(cpa_service *s) {
    const cpa_settings *settings = &s->job.settings;
    cpa_error err;
    cpa_status status =
        cpa_placement_find(s->ranks.comm, (int32_t)settings->threads, (int)settings->bind, &s->placement, &err);
    if (status == CPA_OK)
        status = cpa_placement_choose(s->ranks.comm, (cpa_device_choice)settings->device, &s->placement, &err);
    return cpa_job_ranks_explain(&s->ranks, status, err.message);
}

cpa_exit_code cpa_service_size_cache(cpa_service *s, cpa_cache_size_fn choose, void *ctx) {
    cpa_error err;
    const int64_t memory = cpa_job_ranks_least(&s->ranks, s->placement.memory_bytes);
    cpa_exit_code code = CPA_EXIT_DONE;
    if (s->ranks.rank == 0) {
        const cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->ranks.size, memory);
        cpa_status status = cpa_job_check_memory(&s->job, memory, &err);
        if (status == CPA_OK) status = choose(ctx, &limits, &s->cache, &err);
        code = cpa_job_ranks_explain(&s->ranks, status, err.message);
    }
    cpa_job_ranks_broadcast(&s->ranks, &s->cache, sizeof s->cache);
    return cpa_job_ranks_agree(&s->ranks, code);
}

cpa_exit_code cpa_service_load_network(cpa_service *s, cpa_workload *workload) {
    cpa_error err;
    if (!s->job.has_network) return CPA_EXIT_DONE;
    const cpa_device_options device = cpa_placement_device(&s->placement);
    cpa_status status = cpa_network_open(&s->job, s->ranks.rank, workload, &s->answer, &device, &s->network, &err);
    status = cpa_control_agree(&s->ranks.control, status, &err);
    return cpa_job_ranks_explain(&s->ranks, status, err.message);
}

cpa_exit_code cpa_service_create_engine(cpa_service *s, cpa_engine_options options) {
    cpa_error err;
    options.device = cpa_placement_device(&s->placement);
    if (s->job.has_network) {
        options.network = &s->network.model;
        cpa_transformer_give_forms(s->network.loaded.transformer, &options.model);
    }
    cpa_status status = cpa_job_store_open(&s->job.settings, s->ranks.control.rank, &s->store, &err);
    /* Every rank tells of which model its blocks are. */
    char model[CPA_MODEL_NAME_BYTES] = "";
    if (status == CPA_OK && options.swap_folder && s->ranks.rank == 0)
        status = cpa_model_name(s->job.settings.model_dir, model, &err);
    status = cpa_control_agree(&s->ranks.control, status, &err);
    if (status != CPA_OK) return cpa_job_ranks_explain(&s->ranks, status, err.message);
    cpa_job_ranks_broadcast(&s->ranks, model, sizeof model);
    options.swap_model = model;
    if (s->store.is_open) options.block_store = &s->store.table;
    status = cpa_engine_create(s->ranks.comm, &options, &s->engine, &err);
    if (status != CPA_OK && !cpa_control_all_failed(&s->ranks.control))
        cpa_job_ranks_abort(&s->ranks, status, err.message);
    if (status == CPA_NO_MEMORY) {
        char why[sizeof err.message];
        snprintf(why, sizeof why, "%s", err.message);
        cpa_fail(&err, status,
                 "%.300s; lower --num-blocks (%" PRId64
                 " now), --max-num-batched-tokens, --staging-bytes or --swap-space, or start more ranks",
                 why, s->cache.num_blocks);
    }
    if (status == CPA_INVALID || status == CPA_UNSUPPORTED) cpa_job_name_option(&err);
    return cpa_job_ranks_explain(&s->ranks, status, err.message);
}

cpa_outcome cpa_service_outcome(const cpa_service *s, const cpa_workload *workload, cpa_metrics *metrics) {
    const cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->ranks.size, 0);
    return (cpa_outcome){
        .settings = &s->job.settings,
        .model = &s->job.model,
        .workload = workload,
        .device = "not opened",
        .cp_size = s->ranks.size,
        .interleave = s->job.interleave,
        .block_bytes = cpa_cache_block_bytes(&limits),
        .metrics = metrics,
    };
}

void cpa_service_note_place(cpa_service *s, cpa_outcome *outcome) {
    outcome->device = cpa_engine_device(s->engine);
    outcome->transport = cpa_engine_transport(s->engine);
    if (cpa_engine_links(s->engine, s->links) == CPA_OK) outcome->links = s->links;
}

void cpa_service_note_stats(const cpa_service *s, cpa_outcome *outcome) {
    cpa_engine_get_stats(s->engine, &outcome->stats, sizeof outcome->stats);
}

/* So many blocks from a moment on. */
typedef struct cpa_cache_use {
    double at_s;
    int64_t blocks;
} cpa_cache_use;

void cpa_service_note_step(cpa_service *s, cpa_outcome *outcome, double elapsed_s) {
    const int64_t last = s->n_cache_use > 0 ? s->cache_use[s->n_cache_use - 1].blocks : 0;
    cpa_service_note_stats(s, outcome);
    if (!s->job.settings.timeline[0] || outcome->stats.kv_used == last || s->n_cache_use == CPA_TIMELINE_SPANS) return;
    if (!cpa_array_reserve(&s->cache_use, &s->cap_cache_use, s->n_cache_use + 1, sizeof *s->cache_use)) {
        s->lost_cache_use = 1;
        return;
    }
    s->cache_use[s->n_cache_use++] = (cpa_cache_use){elapsed_s, outcome->stats.kv_used};
}

/* What ranks have sent each other. Collective. */
static cpa_exit_code add_bytes(cpa_service *s, cpa_timeline_json *json) {
    static int64_t bytes[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS]; /* too large for a small stack */
    const int32_t ranks = s->ranks.size;
    const cpa_status known = cpa_engine_bytes_between(s->engine, bytes);
    const cpa_exit_code code = cpa_job_ranks_explain(&s->ranks, known, cpa_engine_error(s->engine));
    for (int32_t rank = 0; known == CPA_OK && s->ranks.rank == 0 && rank < ranks; rank++)
        cpa_timeline_json_add_bytes(json, rank, bytes + rank * ranks);
    return code;
}

cpa_exit_code cpa_service_write_timeline(cpa_service *s) {
    cpa_error err;
    cpa_timeline_json json;
    cpa_exit_code code = CPA_EXIT_DONE;
    const char *path = s->job.settings.timeline;
    if (!path[0]) return CPA_EXIT_DONE;
    if (s->ranks.rank == 0)
        code = cpa_job_ranks_explain(&s->ranks, cpa_timeline_json_open(&json, path, s->ranks.size, &err), err.message);
    code = cpa_job_ranks_agree(&s->ranks, code);
    if (code != CPA_EXIT_DONE) return code;
    const cpa_status gathered = cpa_engine_timeline(s->engine, cpa_timeline_json_add, &json);
    code = cpa_job_ranks_explain(&s->ranks, gathered, cpa_engine_error(s->engine));
    if (gathered == CPA_OK && s->ranks.size > 1) code = add_bytes(s, &json);
    if (s->ranks.rank != 0) return code;
    if (s->lost_cache_use) json.failed = 1;
    for (int64_t i = 0; i < s->n_cache_use; i++)
        cpa_timeline_json_add_cache(&json, s->cache_use[i].at_s, s->cache_use[i].blocks);
    const cpa_status closed = cpa_timeline_json_close(&json, &err);
    return closed == CPA_OK ? code : cpa_job_ranks_explain(&s->ranks, closed, err.message);
}

void cpa_service_close(cpa_service *s) {
    cpa_engine_destroy(s->engine);
    s->engine = NULL;
    cpa_job_store_close(&s->store);
    free(s->cache_use);
    s->cache_use = NULL;
    cpa_network_close(&s->network);
}
