#include "src/schedule/scheduler.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/evicted_units.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/fair_step.h"
#include "src/schedule/scheduler_admit.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_chunk.h"
#include "src/schedule/scheduler_drafts.h"
#include "src/schedule/scheduler_internal.h"
#include "src/schedule/scheduler_preempt.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/scheduler_transfer.h"
#include "src/schedule/scheduler_write.h"
#include "src/schedule/unconfirmed.h"

static int arrives_before(const cpa_sequence *a, const cpa_sequence *b) {
    return a->request.arrival < b->request.arrival;
}

static cpa_status check_group(const cpa_scheduler_options *o, const cpa_layer_group *group, cpa_error *err) {
    if (group->host_blocks < 0 || group->window < 0 || group->sinks < 0)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: %" PRId64 " host blocks, window %" PRId64 ", %" PRId64
                        " sinks; expected none below 0",
                        group->host_blocks, group->window, group->sinks);
    if (o->preemption == CPA_PREEMPT_AUTO && group->host_blocks > 0 &&
        !(o->host_bandwidth > 0 && group->block_bytes > 0 && group->layers > 0))
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: blocks of %" PRId64 " bytes, %" PRId32
                        " layers, %g bytes/s to the host; expected all above 0 to weigh swapping",
                        group->block_bytes, group->layers, o->host_bandwidth);
    return CPA_OK;
}

static cpa_status check_options(const cpa_scheduler_options *o, cpa_error *err) {
    if (o->map.cp_size < 1 || o->planner.cp_size != o->map.cp_size)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: %" PRId32 " ranks, planner for %" PRId32 "; expected the same, at least 1",
                        o->map.cp_size, o->planner.cp_size);
    if (!cpa_interleave_fits(o->map.interleave, o->block_size))
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: interleave %" PRId32 ", expected a divisor or a multiple of block size %" PRId32,
                        o->map.interleave, o->block_size);
    if (o->max_num_batched_tokens < 1 || o->max_num_seqs < 1)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: a step of %" PRId64 " tokens and %" PRId32
                        " sequences; expected at least 1 of each",
                        o->max_num_batched_tokens, o->max_num_seqs);
    if (!o->token_at) return cpa_fail(err, CPA_INVALID, "scheduler: no source of tokens");
    if (o->tenant_block_quota < 0 || o->long_prefill_threshold < 0 || !(o->ageing_s >= 0) ||
        o->local_context < CPA_LOCAL_CONTEXT_NONE)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: quota %" PRId64 ", threshold %" PRId64 ", ageing %g s, local context %" PRId64
                        "; expected none below 0 (local context: %d)",
                        o->tenant_block_quota, o->long_prefill_threshold, o->ageing_s, o->local_context,
                        CPA_LOCAL_CONTEXT_NONE);
    if (o->groups.count < 1 || o->groups.count > CPA_MAX_LAYER_GROUPS)
        return cpa_fail(err, CPA_INVALID, "scheduler: %" PRId32 " groups of layers; expected 1 to %d", o->groups.count,
                        CPA_MAX_LAYER_GROUPS);
    for (int32_t g = 0; g < o->groups.count; g++) CPA_TRY(check_group(o, &o->groups.list[g], err));
    return CPA_OK;
}

static void on_evict(void *ctx, int32_t block, int32_t party) {
    const cpa_evict_ctx *evict = ctx;
    cpa_evicted_put(evict->scheduler, evict->pool, block, party);
    evict->scheduler->stats.evictions += cpa_scheduler_unfind(evict->scheduler, evict->pool, block);
}

/* The pools of device and host blocks, and the caches that find them. */
static cpa_status create_pools(cpa_scheduler *s, cpa_error *err) {
    const cpa_scheduler_options *o = &s->options;
    for (int32_t p = 0; p < s->n_pools; p++) {
        const cpa_layer_group *group = cpa_pool_group(o, p);
        CPA_TRY(cpa_block_pool_create(group->num_blocks, &s->pools[p], err));
        if (s->host_pools) CPA_TRY(cpa_block_pool_create(group->host_blocks, &s->host_pools[p], err));
        s->evict[p] = (cpa_evict_ctx){s, p};
        cpa_block_pool_set_evict(s->pools[p], on_evict, &s->evict[p]);
    }
    for (int32_t g = 0; g < o->groups.count; g++)
        CPA_TRY(
            cpa_prefix_cache_create(o->map.cp_size, o->groups.list[g].num_blocks, o->block_size, &s->caches[g], err));
    return CPA_OK;
}

/* Whether every group has host memory. */
static int has_host_blocks(const cpa_scheduler_options *o) {
    for (int32_t g = 0; g < o->groups.count; g++)
        if (o->groups.list[g].host_blocks == 0) return 0;
    return o->preemption != CPA_PREEMPT_RECOMPUTE || o->keep_evicted;
}

static int64_t largest_pool(const cpa_scheduler_options *o) {
    int64_t largest = 1;
    for (int32_t g = 0; g < o->groups.count; g++) largest = cpa_max64(largest, o->groups.list[g].num_blocks);
    return largest;
}

cpa_status cpa_scheduler_create(const cpa_scheduler_options *options, cpa_scheduler **out, cpa_error *err) {
    CPA_TRY(check_options(options, err));
    size_t ranks = (size_t)options->map.cp_size, pools = (size_t)cpa_pools(options);
    size_t slots = (size_t)options->max_num_seqs;
    cpa_status status = CPA_NO_MEMORY;
    cpa_scheduler *s = calloc(1, sizeof *s);
    if (!s) goto no_memory;
    s->options = *options;
    s->n_pools = cpa_pools(options);
    s->future.before = arrives_before;
    s->waiting.is_fair = options->policy != CPA_POLICY_FCFS;
    s->pools = calloc(pools, sizeof *s->pools);
    s->evict = calloc(pools, sizeof *s->evict);
    s->lacks = calloc(pools, sizeof *s->lacks);
    s->spared = calloc(pools, sizeof *s->spared);
    s->unit = calloc(ranks, sizeof *s->unit);
    s->sources = calloc(pools, sizeof *s->sources);
    s->marks = calloc((size_t)largest_pool(options), sizeof *s->marks);
    if (has_host_blocks(options)) {
        s->host_pools = calloc(pools, sizeof *s->host_pools);
        if (!s->host_pools) goto no_memory;
    }
    s->identity = strdup(options->identity ? options->identity : "");
    s->model = strdup(options->model ? options->model : "");
    s->options.identity = s->options.model = NULL;
    s->running = calloc(slots, sizeof *s->running);
    s->finished = calloc(slots, sizeof *s->finished);
    s->scheduled = calloc(2 * slots, sizeof *s->scheduled);
    s->free_indices = calloc(slots, sizeof *s->free_indices);
    if (!s->pools || !s->evict || !s->lacks || !s->spared || !s->unit || !s->sources || !s->marks || !s->identity ||
        !s->model || !s->running || !s->finished || !s->scheduled || !s->free_indices)
        goto no_memory;
    CPA_TRY_GOTO(create_pools(s, err), fail);
    CPA_TRY_GOTO(cpa_evicted_create(s, err), fail);
    s->n_free_indices = options->max_num_seqs;
    for (int32_t i = 0; i < s->n_free_indices; i++) s->free_indices[i] = s->n_free_indices - 1 - i;
    *out = s;
    return CPA_OK;

no_memory:
    cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for %" PRId32 " sequences on %" PRId32 " ranks",
             options->max_num_seqs, options->map.cp_size);
fail:
    cpa_scheduler_destroy(s);
    return status;
}

void cpa_scheduler_destroy(cpa_scheduler *s) {
    if (!s) return;
    cpa_sequence *sequence, *next;
    HASH_CLEAR(pending, s->pending);
    HASH_ITER(hh, s->by_id, sequence, next) {
        HASH_DEL(s->by_id, sequence);
        cpa_waiting_forget(&s->waiting, sequence);
    }
    for (int32_t i = 0; i < s->n_finished; i++) cpa_waiting_forget(&s->waiting, s->finished[i]);
    cpa_tenants_destroy(&s->tenants);
    cpa_evicted_destroy(s);
    for (int32_t p = 0; s->pools && p < s->n_pools; p++) cpa_block_pool_destroy(s->pools[p]);
    for (int32_t p = 0; s->host_pools && p < s->n_pools; p++) cpa_block_pool_destroy(s->host_pools[p]);
    cpa_unconfirmed_destroy(s);
    for (int32_t g = 0; g < s->options.groups.count; g++) cpa_prefix_cache_destroy(s->caches[g]);
    cpa_sequence_queue_destroy(&s->future);
    free(s->discards);
    free(s->holds);
    free(s->pins);
    free(s->free_indices);
    free(s->scheduled);
    free(s->finished);
    free(s->running);
    free(s->model);
    free(s->identity);
    free(s->marks);
    free(s->sources);
    free(s->unit);
    free(s->spared);
    free(s->lacks);
    free(s->evict);
    free(s->host_pools);
    free(s->pools);
    free(s);
}

cpa_status cpa_scheduler_check(const cpa_scheduler *s, const cpa_scheduler_request *r, cpa_error *err) {
    if (r->prompt_tokens < 1 || r->output_tokens < 1 || r->prompt_tokens > INT64_MAX - r->output_tokens)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": %" PRId64 " prompt and %" PRId64
                        " output tokens; expected at least 1 of each, and fewer than 2^63 in all",
                        r->id, r->prompt_tokens, r->output_tokens);
    if (!isfinite(r->arrival))
        return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": arrival at %g s; expected a finite time", r->id,
                        r->arrival);
    /* On one rank it is placed only if it fits there: cpa_request_may_be_local. */
    int64_t tokens = cpa_cached_tokens(r->prompt_tokens, r->output_tokens),
            blocks = cpa_request_blocks(&s->options, tokens);
    for (int32_t g = 0; g < s->options.groups.count; g++) {
        const int64_t needs = cpa_request_needs(&s->options, g, CPA_SHARDED, tokens);
        const int64_t has = s->options.groups.list[g].num_blocks;
        if (needs > has)
            return cpa_fail(err, CPA_INVALID,
                            "request %" PRIu64 ": %" PRId64 " prompt + %" PRId64 " output tokens need %" PRId64
                            " blocks of %" PRId32 " tokens on one of %" PRId32 " ranks, which has %" PRId64
                            "%s; expected %s%" PRId64 " or more",
                            r->id, r->prompt_tokens, r->output_tokens, needs, s->options.block_size,
                            s->options.map.cp_size, has, g > 0 ? " for layers with narrower windows" : "",
                            g > 0 ? "" : "num_blocks of ", needs);
    }
    int64_t quota = s->options.tenant_block_quota;
    if (quota > 0 && blocks > quota)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": %" PRId64 " prompt + %" PRId64 " output tokens need %" PRId64
                        " blocks on a rank, and a tenant may hold %" PRId64 "; expected tenant_block_quota of %" PRId64
                        " or more",
                        r->id, r->prompt_tokens, r->output_tokens, blocks, quota, blocks);
    return CPA_OK;
}

/* The root of a request's prefix, and the digest of its first block or what there is of it. Where only the samples of a
 * prompt share, their group is part of the root. */
static cpa_status start_prefix(cpa_scheduler *s, const cpa_scheduler_request *request, cpa_prefix_digest *root,
                               cpa_prefix_digest *first, cpa_error *err) {
    const char *salt = request->salt ? request->salt : "";
    int32_t n = s->options.block_size;
    if (n > request->prompt_tokens) n = (int32_t)request->prompt_tokens;
    uint32_t *tokens = cpa_prefix_cache_tokens(s->caches[0]);
    for (int32_t i = 0; i < n; i++) tokens[i] = s->options.token_at(s->options.token_ctx, request->id, i);
    if (cpa_prefix_cache_root(s->caches[0], s->identity, salt, 0, root) &&
        cpa_prefix_cache_link(s->caches[0], root, n, first) &&
        (s->options.prefix_caching || cpa_prefix_cache_root(s->caches[0], s->identity, salt, request->group, root)))
        return CPA_OK;
    return cpa_fail(err, CPA_INTERNAL, "request %" PRIu64 ": SHA-256 of its first tokens failed", request->id);
}

static const char *name_of_tenant(const cpa_scheduler_request *request) {
    const char *name = request->tenant ? request->tenant : request->salt;
    return name ? name : "";
}

cpa_status cpa_scheduler_add(cpa_scheduler *s, const cpa_scheduler_request *request, cpa_error *err) {
    CPA_TRY(cpa_scheduler_check(s, request, err));
    cpa_sequence *other;
    HASH_FIND(hh, s->by_id, &request->id, sizeof request->id, other);
    if (other) return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": another request has this id", request->id);
    cpa_prefix_digest root, first;
    CPA_TRY(start_prefix(s, request, &root, &first, err));
    int64_t most = (int64_t)HASH_COUNT(s->by_id) + 1;
    cpa_sequence *sequence = cpa_sequence_create(&s->options, request, &first);
    if (!sequence) goto no_memory;
    const cpa_status status = cpa_transfer_begin(s, request, sequence, err);
    if (status != CPA_OK) {
        cpa_sequence_destroy(sequence);
        return status;
    }
    sequence->tenant = cpa_tenant_join(&s->tenants, name_of_tenant(request), s->n_pools);
    sequence->root = root;
    if (!sequence->tenant || !cpa_sequence_queue_reserve(&s->future, most) ||
        !cpa_waiting_join(&s->waiting, sequence)) {
        cpa_waiting_forget(&s->waiting, sequence);
        goto no_memory;
    }
    HASH_ADD_KEYPTR(hh, s->by_id, &sequence->request.id, sizeof sequence->request.id, sequence);
    if (!sequence->hh.tbl) {
        cpa_waiting_forget(&s->waiting, sequence);
        goto no_memory;
    }
    cpa_sequence_queue_push(&s->future, sequence);
    return CPA_OK;

no_memory:
    return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to queue it", request->id);
}

/* Says which tokens nobody wants any more. */
static cpa_status write_discards(cpa_scheduler *s, cpa_error *err) {
    for (int64_t i = 0; i < s->n_discards; i++) {
        cpa_plan_discard *discard = cpa_step_plan_add_discard(s->plan);
        if (!discard) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        *discard = s->discards[i];
    }
    s->n_discards = 0;
    return CPA_OK;
}

/* Indices and blocks of the sequences that ended in or since the last plan are free from this one on, and what its
 * copies read. */
static cpa_status retire_finished(cpa_scheduler *s, cpa_error *err) {
    CPA_TRY(cpa_scheduler_unpin_all(s, err));
    CPA_TRY(write_discards(s, err));
    while (s->n_finished > 0) {
        cpa_sequence *sequence = s->finished[--s->n_finished];
        *cpa_step_plan_add_release(s->plan) = sequence->index;
        s->free_indices[s->n_free_indices++] = sequence->index;
        cpa_scheduler_charge(sequence, s->n_pools, -1);
        cpa_status status = cpa_sequence_close(sequence, s->pools, s->n_pools, err);
        cpa_waiting_forget(&s->waiting, sequence);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

/* Sequences that came back from host memory with damage go back to the start. */
static cpa_status restart_damaged(cpa_scheduler *s, cpa_error *err) {
    for (int32_t i = s->n_running - 1; i >= 0; i--) {
        cpa_sequence *sequence = s->running[i];
        if (!sequence->restart) continue;
        CPA_TRY(cpa_scheduler_preempt(s, i, 0, err));
        sequence->ready = s->step; /* it has had no tokens yet, and goes on at once */
    }
    return CPA_OK;
}

/* Places the running sequences that decode (or those that do not), the first ones first. A preemption only removes
 * sequences after the one at hand. */
static cpa_status schedule_running(cpa_scheduler *s, int decodes, cpa_error *err) {
    for (int32_t i = 0; i < s->n_running && s->budget > 0; i++) {
        cpa_sequence *sequence = s->running[i];
        if (cpa_sequence_decodes(sequence) != decodes || sequence->ready > s->step) continue;
        if (decodes && !cpa_fair_step_has_turn(s, sequence)) continue;
        int64_t tokens = cpa_scheduler_chunk_tokens(s, sequence, 0);
        if (tokens == 0) continue;
        int room = cpa_scheduler_has_room(s, sequence, sequence->computed + tokens);
        if (!room || !cpa_scheduler_within_quota(s, sequence)) {
            int made;
            CPA_TRY(cpa_scheduler_make_room(s, i, &made, err));
            s->short_of_blocks |= !room || made;
            if (!made) continue;
        }
        cpa_scheduler_place(s, sequence, tokens);
    }
    return CPA_OK;
}

/* Moves the sequences whose last token is planned out of the running ones. */
static void collect_finished(cpa_scheduler *s) {
    int32_t kept = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        cpa_sequence *sequence = s->running[i];
        if (sequence->emitted < sequence->request.output_tokens) {
            s->running[kept++] = sequence;
        } else {
            cpa_scheduler_unlink(s, sequence);
            HASH_DEL(s->by_id, sequence);
            sequence->tenant->running--;
            s->finished[s->n_finished++] = sequence;
            s->stats.finished++;
        }
    }
    s->n_running = kept;
}

/* Who has arrived waits. Returns the tenant among them that is below its share, has few requests, and was served least;
 * NULL: none is. */
static const cpa_tenant *let_arrive(cpa_scheduler *s, double now) {
    const cpa_tenant *least = NULL;
    while (s->future.count > 0 && cpa_sequence_queue_first(&s->future)->request.arrival <= now) {
        cpa_sequence *sequence = cpa_sequence_queue_pop(&s->future);
        cpa_tenant *tenant = sequence->tenant;
        sequence->arrived = 1;
        cpa_tenant_arrive(tenant);
        cpa_waiting_push(&s->waiting, sequence);
        if (cpa_fair_is_below(s, tenant) && !cpa_fair_has_many(tenant) && (!least || tenant->service < least->service))
            least = tenant;
    }
    return least;
}

/* The time from which on there may be more to plan. */
static double next_time(const cpa_scheduler *s, double now) {
    for (int32_t i = 0; s->plan->n_chunks == 0 && i < s->n_running; i++)
        if (s->running[i]->ready > s->step) return now;
    if (s->plan->n_chunks == 0 && (s->awaits_confirmation || cpa_evicted_is_moving(s) || s->n_holds > 0)) return now;
    return s->future.count > 0 ? cpa_sequence_queue_first(&s->future)->request.arrival : INFINITY;
}

cpa_status cpa_scheduler_plan(cpa_scheduler *s, double now, cpa_step_plan *plan, double *next_arrival, cpa_error *err) {
    cpa_step_plan_clear(plan);
    if (!cpa_step_plan_reserve(plan, 0, s->n_running + s->n_finished, 0, 0, 0))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    plan->step = s->step;
    s->plan = plan;
    s->budget = s->options.max_num_batched_tokens;
    s->n_scheduled = 0;
    s->short_of_blocks = 0;
    cpa_unconfirmed_settle(s);
    CPA_TRY(cpa_scheduler_settle_drafts(s, err));
    CPA_TRY(retire_finished(s, err));
    CPA_TRY(cpa_evicted_settle(s, err));
    CPA_TRY(restart_damaged(s, err));
    CPA_TRY(cpa_scheduler_null_unseen(s, err));
    cpa_fair_step_begin(s, now, let_arrive(s, now));
    CPA_TRY(schedule_running(s, 1, err));
    cpa_scheduler_add_drafts(s);
    CPA_TRY(schedule_running(s, 0, err));
    CPA_TRY(cpa_scheduler_admit(s, err));
    CPA_TRY(cpa_scheduler_write(s, err));
    cpa_fair_step_end(s, now);
    collect_finished(s);
    *next_arrival = next_time(s, now);
    s->plan = NULL;
    s->step++;
    return CPA_OK;
}

cpa_status cpa_scheduler_swap_failed(cpa_scheduler *s, uint64_t request, cpa_error *err) {
    cpa_sequence *sequence;
    HASH_FIND(hh, s->by_id, &request, sizeof request, sequence);
    if (!sequence) return cpa_fail(err, CPA_INVALID, "request %" PRIu64 " is not there to be computed again", request);
    if (sequence->restart || (!sequence->blocks && sequence->computed == 0)) return CPA_OK; /* heard of before */
    s->stats.swap_failures++;
    return cpa_scheduler_start_again(s, sequence, err);
}

void cpa_scheduler_get_stats(const cpa_scheduler *s, cpa_scheduler_stats *out) {
    *out = s->stats;
    out->waiting = s->future.count + s->waiting.count;
    out->running = s->n_running;
    out->tenants = cpa_tenants_active(&s->tenants);
    cpa_evicted_count(s, &out->blocks_in_host, &out->blocks_on_disk);
    for (int32_t p = 0; p < s->n_pools; p++) {
        const cpa_block_pool *pool = s->pools[p];
        int64_t *used = &out->used_blocks[p / s->options.map.cp_size];
        int64_t *peak = &out->peak_blocks[p / s->options.map.cp_size];
        *used = cpa_max64(*used, cpa_block_pool_total(pool) - cpa_block_pool_free_count(pool));
        *peak = cpa_max64(*peak, cpa_block_pool_peak(pool));
    }
}
