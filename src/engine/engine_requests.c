/* What any thread of rank 0 may call: requests come and go while the engine runs. */
#include "src/engine/engine_requests.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/engine/engine_options.h"
#include "src/engine/request_limits.h"

/* The last failure of a call of this thread, and the serial number of its engine. */
static _Thread_local struct {
    uint64_t engine;
    cpa_error error;
} own;

cpa_status cpa_engine_outcome(const cpa_engine *engine, cpa_status status, const cpa_error *err) {
    if (status == CPA_OK) return CPA_OK;
    own.engine = engine->serial;
    own.error = *err;
    return status;
}

static cpa_status check_rank(const cpa_engine *engine, const char *call, cpa_error *err) {
    const int32_t rank = engine->control.rank;
    return rank == 0 ? CPA_OK : cpa_fail(err, CPA_INVALID, "%s: called on rank %d, expected rank 0", call, rank);
}

/* With the tokens that end it, and its biases, where any is drawn. */
static cpa_status submit_scheduled(cpa_engine *engine, const cpa_request *request, const cpa_sampling *sampling,
                                   cpa_scheduler_request *scheduled, cpa_error *err) {
    const cpa_sampling none = {.size = sizeof none};
    cpa_plan_bias *biases = NULL;
    const int64_t ends = scheduled->draws && !sampling->ignore_eos ? engine->network.n_end_ids : 0;
    const int64_t stops = scheduled->draws ? sampling->n_stop_ids : 0;
    uint32_t *ids = malloc((size_t)(ends + stops) * sizeof *ids + 1);
    if (!ids) return cpa_fail(err, CPA_NO_MEMORY, "request %llu: no memory", (unsigned long long)request->id);
    if (ends > 0) memcpy(ids, engine->network.end_ids, (size_t)ends * sizeof *ids);
    if (stops > 0) memcpy(ids + ends, sampling->stop_ids, (size_t)stops * sizeof *ids);
    cpa_status status = cpa_request_plan_biases(request->id, scheduled->draws ? sampling : &none, ids, ends + stops,
                                                &scheduled->sampling, &biases, err);
    const cpa_request_terms terms = {request->deadline_s, ids, ends + stops, request->constraint,
                                     request->constraint_ctx};
    scheduled->biases = biases;
    if (status == CPA_OK) status = cpa_inbox_submit(engine->inbox, scheduled, &terms, err);
    free(biases);
    free(ids);
    return status;
}

static cpa_status submit(cpa_engine *engine, const cpa_request *given, cpa_error *err) {
    cpa_request request;
    CPA_TRY(check_rank(engine, "cpa_engine_submit", err));
    CPA_TRY(CPA_STRUCT_TAKE("request", given, cpa_request, output_tokens, &request, err));
    if (!isfinite(request.arrival_s) || request.arrival_s < 0) {
        return cpa_fail(err, CPA_INVALID, "request %llu: arrival %g s, expected a time from 0 on",
                        (unsigned long long)request.id, request.arrival_s);
    }
    if (!isfinite(request.deadline_s) || request.deadline_s < 0) {
        return cpa_fail(err, CPA_INVALID,
                        "request %llu: deadline %g s, expected 0 (none) or a time from its arrival on",
                        (unsigned long long)request.id, request.deadline_s);
    }
    const uint32_t known = CPA_TRANSFER_IMPORT | CPA_TRANSFER_EXPORT;
    if (request.transfer & ~known || (request.transfer && !engine->options.block_store)) {
        return cpa_fail(err, CPA_INVALID,
                        "request %llu: transfer %#x, expected bits of %#x, and 0 without a block_store",
                        (unsigned long long)request.id, request.transfer, known);
    }
    cpa_sampling sampling;
    CPA_TRY(cpa_engine_check_sampling(request.id, request.sampling, &sampling, err));
    if ((sampling.top_logprobs > 0 || sampling.prompt_logprobs) && !engine->network.gives_ranks)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "request %llu: top_logprobs %d and prompt_logprobs %d, but the model does not tell them",
                        (unsigned long long)request.id, sampling.top_logprobs, sampling.prompt_logprobs);
    cpa_scheduler_request scheduled = cpa_engine_scheduled(&request);
    scheduled.sampling = cpa_engine_planned_sampling(&sampling);
    scheduled.sampling.constrained = request.constraint != NULL;
    scheduled.draws = engine->network.end_step && !engine->options.outputs_given;
    CPA_TRY(cpa_request_check_limits(&request, &sampling, &engine->network, scheduled.draws, err));
    return submit_scheduled(engine, &request, &sampling, &scheduled, err);
}

cpa_status cpa_engine_submit(cpa_engine *engine, const cpa_request *request) {
    cpa_error err = {CPA_OK, ""};
    return engine ? cpa_engine_outcome(engine, submit(engine, request, &err), &err) : CPA_INVALID;
}

static cpa_status cancel(cpa_engine *engine, uint64_t id, cpa_error *err) {
    CPA_TRY(check_rank(engine, "cpa_engine_cancel", err));
    return cpa_inbox_cancel(engine->inbox, id, err);
}

cpa_status cpa_engine_cancel(cpa_engine *engine, uint64_t id) {
    cpa_error err = {CPA_OK, ""};
    return engine ? cpa_engine_outcome(engine, cancel(engine, id, &err), &err) : CPA_INVALID;
}

static cpa_status drain(cpa_engine *engine, double timeout_s, cpa_error *err) {
    CPA_TRY(check_rank(engine, "cpa_engine_drain", err));
    if (!(timeout_s >= 0)) return cpa_fail(err, CPA_INVALID, "cpa_engine_drain: %g s, expected 0 or more", timeout_s);
    return cpa_inbox_drain(engine->inbox, timeout_s, err);
}

cpa_status cpa_engine_drain(cpa_engine *engine, double timeout_s) {
    cpa_error err = {CPA_OK, ""};
    return engine ? cpa_engine_outcome(engine, drain(engine, timeout_s, &err), &err) : CPA_INVALID;
}

void cpa_engine_stop(cpa_engine *engine) {
    if (engine) atomic_store(&engine->stop, 1);
}

const char *cpa_engine_error(const cpa_engine *engine) {
    if (!engine) return "";
    if (own.engine == engine->serial) return own.error.message;
    return atomic_load(&engine->running) ? "" : engine->error.message;
}
