#include "src/llm/llm_setup.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>

#include "base/cgroup.h"
#include "base/check.h"
#include "base/min_max.h"
#include "base/struct_size.h"
#include "src/llm/folder_model.h"
#include "src/schedule/default_sizes.h"

/* Of a device's free memory, for weights and cache together. */
#define DEVICE_SHARE 0.9

static int is_on_cuda(const cpa_llm_setup *s) {
    return s->engine.device.backend == CPA_BACKEND_CUDA;
}

/* ---- options ---- */

/* A thread for each processor that this process may use; ranks are taken to share them. */
static int32_t thread_count(int32_t ranks) {
    cpu_set_t set;
    int32_t count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const int32_t paid = cpa_cgroup_cores();
    if (paid > 0 && paid < count) count = paid;
    return count / ranks > 0 ? count / ranks : 1;
}

static void choose_device(cpa_llm_setup *s, int32_t ranks) {
    cpa_device_options *device = &s->engine.device;
    if (!device->size) {
        *device = (cpa_device_options){.size = sizeof *device};
        if (cpa_device_count(CPA_BACKEND_CUDA) > 0) device->backend = CPA_BACKEND_CUDA;
    }
    if (device->threads == 0) device->threads = thread_count(ranks);
}

static cpa_status take_options(const cpa_llm_options *options, int32_t ranks, cpa_llm_setup *s, cpa_error *err) {
    const cpa_llm_options none = {.size = sizeof none};
    const cpa_engine_options plain = {.size = sizeof plain};
    cpa_engine_options *engine = &s->engine;
    CPA_TRY(CPA_STRUCT_TAKE("llm", options ? options : &none, cpa_llm_options, size, &s->options, err));
    const cpa_engine_options *given = s->options.engine ? s->options.engine : &plain;
    CPA_TRY(CPA_STRUCT_TAKE("llm: engine", given, cpa_engine_options, size, engine, err));
    if (s->options.max_model_len < 0)
        return cpa_fail(err, CPA_INVALID, "max_model_len: found %" PRId64 ", expected 0 or more",
                        s->options.max_model_len);
    if (!(s->options.gpu_memory_utilization >= 0 && s->options.gpu_memory_utilization <= 1))
        return cpa_fail(err, CPA_INVALID, "gpu_memory_utilization: found %g, expected 0 to 1",
                        s->options.gpu_memory_utilization);
    choose_device(s, ranks);
    cpa_engine_default_sizes(engine);
    engine->outputs_given = 0;
    return CPA_OK;
}

/* What sizes are computed from; the engine checks the rest. */
static cpa_status check_sizes(const cpa_engine_options *e, cpa_error *err) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"block_size", e->block_size},
                 {"interleave", e->interleave},
                 {"max_num_batched_tokens", e->max_num_batched_tokens},
                 {"max_num_seqs", e->max_num_seqs},
                 {"window_seqs", e->window_seqs}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value < 1)
            return cpa_fail(err, CPA_INVALID, "%s: found %" PRId64 ", expected at least 1", sizes[i].name,
                            sizes[i].value);
    }
    if (e->num_blocks < 0)
        return cpa_fail(err, CPA_INVALID, "num_blocks: found %" PRId64 ", expected 0 or more", e->num_blocks);
    return CPA_OK;
}

/* ---- the model ---- */

static cpa_status read_model(cpa_llm_setup *s, int32_t rank, int32_t ranks, cpa_error *err) {
    const cpa_llm_options *o = &s->options;
    CPA_TRY(cpa_model_config_load(s->folder, &s->config, err));
    s->config.draft_layers = s->engine.drafter == CPA_DRAFT_MODEL;
    if (s->config.draft_layers > s->config.next_modules)
        return cpa_fail(err, CPA_INVALID,
                        "drafter: found that of the model, expected another, as %.300s/config.json has no "
                        "num_nextn_predict_layers above 0",
                        s->folder);
    const cpa_dtype said = s->config.has_dtype ? s->config.dtype : CPA_BF16;
    const cpa_dtype dtype = o->has_dtype ? o->dtype : is_on_cuda(s) ? said : CPA_F32;
    s->engine.model = cpa_model_config_shape(&s->config, dtype, s->masks);
    if (o->has_kv_dtype) s->engine.model.attention.kv_dtype = o->kv_dtype;
    s->config.index.dtype = cpa_index_dtype_beside(dtype, s->engine.model.attention.kv_dtype);
    s->transformer = (cpa_transformer_options){
        .dtype = dtype,
        .max_rows = s->engine.max_num_batched_tokens,
        .max_sequences = s->engine.max_num_seqs,
        .slices = is_on_cuda(s) && ranks > 1 ? CPA_SLICES_DECODE : CPA_SLICES_NONE,
        .rank = rank,
        .ranks = ranks,
    };
    return CPA_OK;
}

/* ---- memory and lengths ---- */

/* Free memory of this rank; ranks on the host are taken to share it. */
static int64_t own_memory(const cpa_llm_setup *s, int32_t ranks) {
    if (is_on_cuda(s)) return cpa_device_free_memory(CPA_BACKEND_CUDA, s->engine.device.ordinal);
    return cpa_cgroup_memory() / ranks;
}

/* Where all have their device: that of the rank with the least. */
static cpa_status least_memory(const cpa_llm_setup *s, cpa_comm *comm, int64_t *out, cpa_error *err) {
    const int32_t ranks = cpa_comm_size(comm);
    const int64_t mine = own_memory(s, ranks);
    int64_t *all = calloc((size_t)ranks, sizeof *all);
    cpa_status status = all ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the figures of %d ranks", ranks);
    status = cpa_comm_agree(comm, status, err);
    if (status == CPA_OK) status = cpa_comm_all_gather(comm, &mine, sizeof mine, all, err);
    if (status == CPA_OK) {
        *out = mine;
        for (int32_t rank = 0; rank < ranks; rank++) *out = cpa_min64(*out, all[rank]);
    }
    free(all);
    return status;
}

static cpa_cache_limits cache_limits(const cpa_llm_setup *s, int64_t memory_bytes, int64_t network_bytes) {
    const cpa_engine_options *e = &s->engine;
    const double share = s->options.gpu_memory_utilization > 0 ? s->options.gpu_memory_utilization : DEVICE_SHARE;
    const cpa_cache_memory memory = {.memory_bytes = memory_bytes,
                                     .network_bytes = network_bytes,
                                     .num_blocks = e->num_blocks,
                                     .share = is_on_cuda(s) ? share : 0,
                                     .staging_bytes = e->staging_bytes};
    return (cpa_cache_limits){
        .model = e->model,
        .block_size = e->block_size,
        .map = {s->transformer.ranks, e->interleave},
        .max_num_seqs = e->max_num_seqs,
        .window_seqs = e->window_seqs,
        .precise_tokens = e->precise_tokens,
        .max_num_batched_tokens = e->max_num_batched_tokens,
        .memory_bytes = cpa_cache_memory_bytes(&memory),
    };
}

static cpa_status find_lengths(cpa_llm_setup *s, int64_t memory_bytes, cpa_error *err) {
    const int64_t network_bytes = cpa_folder_model_bytes(&s->config, &s->transformer);
    const cpa_length_wishes wishes = {
        .asked = {.num_blocks = s->engine.num_blocks, .max_model_len = s->options.max_model_len},
        .on_cuda = is_on_cuda(s),
        .positions = s->config.max_position,
        .model = s->folder,
        .num_blocks_option = "num_blocks",
        .max_model_len_option = "max_model_len",
    };
    if (network_bytes >= memory_bytes)
        return cpa_fail(err, CPA_NO_MEMORY,
                        "%.200s: found %" PRId64 " MiB of free memory a rank, expected more than the %" PRId64
                        " MiB of weights and rows (fewer rows: max_num_batched_tokens)",
                        s->folder, memory_bytes >> 20, network_bytes >> 20);
    const cpa_cache_limits limits = cache_limits(s, memory_bytes, network_bytes);
    return cpa_length_limits_find(&wishes, &limits, &s->lengths, err);
}

cpa_status cpa_llm_setup_find(const char *folder, const cpa_llm_options *options, cpa_comm *comm, cpa_llm_setup *out,
                              cpa_error *err) {
    const int32_t rank = cpa_comm_rank(comm), ranks = cpa_comm_size(comm);
    int64_t memory_bytes = 0;
    out->folder = folder;
    cpa_status status = take_options(options, ranks, out, err);
    if (status == CPA_OK) status = check_sizes(&out->engine, err);
    if (status == CPA_OK) status = read_model(out, rank, ranks, err);
    CPA_TRY(cpa_comm_agree(comm, status, err));
    CPA_TRY(least_memory(out, comm, &memory_bytes, err));
    status = rank == 0 ? find_lengths(out, memory_bytes, err) : CPA_OK;
    CPA_TRY(cpa_comm_agree(comm, status, err));
    CPA_TRY(cpa_comm_broadcast(comm, &out->lengths, sizeof out->lengths, 0, err));
    out->engine.num_blocks = out->lengths.num_blocks;
    return CPA_OK;
}
