/* cpa_context_select: what is checked of a call, and what comes of a refusal. */
#include <inttypes.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context_internal.h"
#include "src/context/context_plan.h"
#include "src/ops/check_args.h"

static cpa_status check_step(cpa_context *c, const cpa_stream *stream) {
    cpa_error *err = &c->ops.error;
    CPA_TRY(cpa_context_check_whole(c));
    REQUIRE(err, c->ops.options.index.heads > 0, "select: the context has no indexer");
    REQUIRE(err, !cpa_context_is_reserved(c), "select: the step is the reserved one, expected one of cpa_context_plan");
    REQUIRE(err, c->planned, "select: no step is planned, expected a call of cpa_context_plan before");
    REQUIRE(err, stream && stream->device == c->ops.device,
            "select: the stream is %s, expected one of the context's device", stream ? "of another device" : "NULL");
    if (stream->device->table->stream_is_captured(stream))
        return cpa_fail(err, CPA_UNSUPPORTED, "select: the stream is in a capture of the caller's");
    return CPA_OK;
}

static cpa_status check_args(cpa_context *c, const cpa_context_select_args *args) {
    const cpa_index_form *form = &c->ops.options.index;
    const cpa_kv_view *kv = &args->cache.kv;
    const int64_t rows = cpa_index_choice_given_rows(&c->choice);
    cpa_error *err = &c->ops.error;
    REQUIRE(err, rows == 0 || args->q, "select: %" PRId64 " rows, but q is NULL", rows);
    REQUIRE(err, !args->weights == !form->has_weights || (rows == 0 && !args->weights),
            "select: weights is %p, expected %s", (const void *)args->weights,
            form->has_weights ? "those of each head, as the indexer has weights" : "NULL, as the indexer has none");
    CPA_TRY(cpa_check_aligned("select", "q", args->q, cpa_dtype_bytes(form->dtype), err));
    CPA_TRY(cpa_check_aligned("select", "weights", args->weights, sizeof *args->weights, err));
    CPA_TRY(cpa_check_view("select", kv, err));
    REQUIRE(err, kv->dtype == form->dtype && kv->k_dim == form->dim && kv->block_size == c->ops.options.block_size,
            "select: the cache has keys of %d in %s and blocks of %d, expected %d, %s and %d, those of the indexer",
            kv->k_dim, cpa_dtype_name(kv->dtype), kv->block_size, form->dim, cpa_dtype_name(form->dtype),
            c->ops.options.block_size);
    REQUIRE(err, c->step.max_block[c->ops.table_set] < kv->num_blocks,
            "select: a block table names block %d of a cache of %" PRId64 ", expected 0..%" PRId64,
            c->step.max_block[c->ops.table_set], kv->num_blocks, kv->num_blocks - 1);
    return CPA_OK;
}

static cpa_status select_keys(cpa_context *c, const cpa_context_select_args *given, cpa_key_indices *out,
                              cpa_stream *stream, int64_t call) {
    cpa_context_select_args args;
    cpa_progress_hook messages;
    const int exchanges = !cpa_context_is_reserved(c) && cpa_index_choice_exchanges(&c->choice);
    cpa_status status = cpa_context_agree_on_plan(c);
    if (status != CPA_OK && !c->broken) return status; /* on all ranks alike */
    if (status == CPA_OK) status = check_step(c, stream);
    if (status == CPA_OK)
        status = CPA_STRUCT_TAKE("select", given, cpa_context_select_args, cache, &args, &c->ops.error);
    if (status == CPA_OK && !out) status = cpa_fail(&c->ops.error, CPA_INVALID, "select: out is NULL");
    if (status == CPA_OK) status = check_args(c, &args);
    if (status == CPA_OK) status = cpa_context_upload_tables(c, stream);
    if (status != CPA_OK) {
        if (exchanges) c->planned = 0;
    } else {
        if (!exchanges) return cpa_index_choice_run(&c->choice, &args, out, stream);
        cpa_context_begin_exchanging(c, call, stream, &messages);
        status = cpa_index_choice_run(&c->choice, &args, out, stream);
        cpa_context_end_exchanging(c, status, &messages);
    }
    if (status != CPA_OK && (c->broken || exchanges))
        cpa_comm_refuse(c->control.comm, c->control.channel, call, c->broken, &c->ops.error);
    return status;
}

cpa_status cpa_context_select(cpa_context *c, const cpa_context_select_args *args, cpa_key_indices *out,
                              cpa_stream *stream) {
    if (!c) return CPA_INVALID;
    const int64_t call = c->calls++;
    cpa_comm_begin_wait(c->control.comm, (cpa_calls){c->control.channel, call, call});
    const cpa_status status = select_keys(c, args, out, stream, call);
    cpa_comm_end_wait(c->control.comm);
    return status;
}
