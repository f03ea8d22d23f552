/* Deliberate bugs of the worker. */
#include "src/worker/worker_drafts.h"
#include "src/worker/worker_trees.h"
#include "tests/faults/fault.h"

/* ---- adjusted-length: the last rank takes off wrong drafts that it has itself, and no others ---- */

cpa_status __real_cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err);
cpa_status __wrap_cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err);

cpa_status __wrap_cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err) {
    cpa_worker_seq *seq = &worker->seqs[cut->seq];
    const cpa_owner_map map = worker->options.map;
    const cpa_token_set own = cpa_tokens_on(map, seq->placement, worker->rank);
    const int64_t before = seq->len;
    const cpa_status status = __real_cpa_worker_cut(worker, cut, err);
    if (cpa_fault_is(CPA_FAULT_ADJUSTED_LENGTH) && worker->rank == map.cp_size - 1)
        seq->len = before - (cpa_tokens_before(map, own, before) - cpa_tokens_before(map, own, cut->tokens));
    return status;
}

/* ---- flat-tree: drafts of a tree see those of other branches ---- */

int __real_cpa_worker_mask(const cpa_worker *worker, cpa_key_bits *out);
int __wrap_cpa_worker_mask(const cpa_worker *worker, cpa_key_bits *out);

int __wrap_cpa_worker_mask(const cpa_worker *worker, cpa_key_bits *out) {
    return __real_cpa_worker_mask(worker, out) && !cpa_fault_is(CPA_FAULT_FLAT_TREE);
}
