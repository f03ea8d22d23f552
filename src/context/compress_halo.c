#include "src/context/compress_halo.h"

#include <stdlib.h>

#include "base/check.h"
#include "src/context/row_exchange.h"
#include "src/ops/check_args.h"

/* The first position of a run in (start, end], of a sequence whose runs lie on ranks in turn. */
static int64_t first_boundary(int32_t run, int64_t start) {
    return (start / run + 1) * run;
}

/* Counts the boundaries of the chunks, and notes them where there is room. */
static void find_boundaries(cpa_halo_plan *plan, cpa_owner_map map, const cpa_context_chunk *chunks, int64_t n_chunks) {
    plan->n_sent = plan->n_received = plan->n_all = 0;
    for (int64_t i = 0; i < n_chunks; i++) {
        const cpa_context_chunk *chunk = &chunks[i];
        if (chunk->placement.kind != CPA_SHARDED) continue;
        const int64_t end = chunk->start + chunk->count;
        for (int64_t at = first_boundary(map.interleave, chunk->start); at <= end; at += map.interleave) {
            plan->n_all++;
            if (cpa_owner_rank(map, chunk->placement, at - 1) == plan->rank) {
                if (plan->sent) plan->sent[plan->n_sent] = (cpa_halo_boundary){i, at};
                plan->n_sent++;
            }
            if (cpa_owner_rank(map, chunk->placement, at) == plan->rank) {
                if (plan->received) plan->received[plan->n_received] = (cpa_halo_boundary){i, at};
                plan->n_received++;
            }
        }
    }
}

cpa_status cpa_halo_plan_make(cpa_halo_plan *plan, cpa_owner_map map, int32_t rank, int32_t ratio,
                              const cpa_context_chunk *chunks, int64_t n_chunks, cpa_error *err) {
    CPA_TRY(cpa_check_map("halos", map, err));
    REQUIRE(err, map.cp_size <= CPA_COMM_MAX_RANKS && rank >= 0 && rank < map.cp_size,
            "halos: rank is %d of %d, expected one of at most %d", rank, map.cp_size, (int)CPA_COMM_MAX_RANKS);
    REQUIRE(err, ratio >= 1 && map.interleave % ratio == 0,
            "halos: the interleave is %d and an entry has %d tokens, expected a multiple", map.interleave, ratio);
    *plan = (cpa_halo_plan){.rank = rank, .ranks = map.cp_size, .ratio = ratio};
    if (map.cp_size == 1) return CPA_OK;
    find_boundaries(plan, map, chunks, n_chunks);
    plan->sent = malloc((size_t)(plan->n_sent + 1) * sizeof *plan->sent);
    plan->received = malloc((size_t)(plan->n_received + 1) * sizeof *plan->received);
    if (!plan->sent || !plan->received) {
        cpa_halo_plan_free(plan);
        return cpa_fail(err, CPA_NO_MEMORY, "halos: no memory for the boundaries of %lld chunks", (long long)n_chunks);
    }
    find_boundaries(plan, map, chunks, n_chunks);
    plan->send_rows[(rank + 1) % map.cp_size] = plan->n_sent; /* runs go round */
    plan->receive_rows[(rank + map.cp_size - 1) % map.cp_size] = plan->n_received;
    return CPA_OK;
}

void cpa_halo_plan_free(cpa_halo_plan *plan) {
    free(plan->received);
    free(plan->sent);
    *plan = (cpa_halo_plan){0};
}

cpa_status cpa_context_exchange_halos(cpa_context *context, const cpa_halo_plan *plan, const cpa_halo_args *args,
                                      cpa_stream *stream) {
    const cpa_compress_halo_pack_args pack = {
        .size = sizeof pack, .halos = plan->n_sent, .state = args->state, .slots = args->slots, .out = args->packed};
    if (plan->n_all == 0) return CPA_OK;
    CPA_TRY(cpa_compress_halo_pack(&pack, stream));
    const cpa_row_exchange rows = cpa_context_row_exchange(context);
    const cpa_row_exchange_args exchange = {
        .size = sizeof exchange,
        .row_bytes = (int64_t)plan->ratio * 2 * args->state.head * (int64_t)sizeof(float),
        .send_rows = plan->send_rows,
        .receive_rows = plan->receive_rows,
        .send = args->packed,
        .receive = args->halos};
    return rows.exchange(rows.ctx, &exchange, stream);
}
