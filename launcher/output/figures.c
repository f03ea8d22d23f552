#include "launcher/output/figures.h"

#include <math.h>

/* Parts of a row: COUNT or REAL, and METRIC, or both. */
#define COUNT(member, which, name)                                                                                     \
    .offset = offsetof(cpa_engine_stats, member), .object = CPA_FIGURE_##which, .key = name
#define REAL(member, which, name, times) COUNT(member, which, name), .is_real = 1, .scale = times
#define ALONE(member) COUNT(member, METRIC_ALONE, NULL)
#define METRIC(name, kind, words) .metric = name, .type = kind, .help = words

static const char counter[] = "counter", gauge[] = "gauge";

const cpa_figure cpa_figures[] = {
    {ALONE(requests_running), METRIC("num_requests_running", gauge, "Requests that run.")},
    {ALONE(requests_waiting),
     METRIC("num_requests_waiting", gauge, "Requests that wait, for their first step or to go on.")},
    {ALONE(tenants_active), METRIC("num_tenants", gauge, "Tenants whose requests run or wait.")},
    {ALONE(kv_used),
     METRIC("kv_cache_usage_perc", gauge,
            "Share of the blocks of a rank that requests have, of the rank and the group of layers with the most; 1: "
            "all."),
     .unit = CPA_METRIC_SHARE_OF_BLOCKS},
    {COUNT(kv_blocks, KV, "blocks")},
    {COUNT(kv_peak, KV, "peak")},
    {COUNT(preemptions, KV, "preemptions")},
    {COUNT(cut_chunks, KV, "cut_chunks")},
    {COUNT(held_back, KV, "held_back")},
    {COUNT(prefix_queries, KV, "prefix_queries"),
     METRIC("prefix_cache_queries_total", counter,
            "Tokens in full blocks of the prompts that were looked for in the cache."),
     .unit = CPA_METRIC_TOKENS_OF_BLOCKS},
    {COUNT(prefix_hits, KV, "prefix_hits"),
     METRIC("prefix_cache_hits_total", counter, "Of these, tokens whose blocks were found."),
     .unit = CPA_METRIC_TOKENS_OF_BLOCKS},
    {ALONE(preemptions), METRIC("num_preemptions_total", counter, "Times that a running request gave way to others.")},
    {COUNT(keys_attended, KV, "keys_attended")},
    {COUNT(keys_read, KV, "keys_read")},
    {COUNT(evictions, KV, "evictions")},
    {COUNT(swapped_in, KV, "swapped_in")},
    {COUNT(swapped_out, KV, "swapped_out")},
    {COUNT(swap_failures, KV, "swap_failures")},
    {COUNT(kept_blocks, KV, "kept_blocks"),
     METRIC("evicted_blocks_kept_total", counter, "Evicted blocks that moved to host memory, sum over ranks.")},
    {COUNT(fetched_blocks, KV, "fetched_blocks"),
     METRIC("evicted_blocks_found_total", counter, "Blocks that came back from there for requests, sum over ranks.")},
    {COUNT(damaged_blocks, KV, "damaged_blocks"),
     METRIC("evicted_blocks_damaged_total", counter,
            "Blocks that were damaged in host memory or the swap folder, or not there, and were computed again.")},
    {COUNT(host_blocks, KV, "host_blocks"),
     METRIC("evicted_blocks_in_host", gauge, "Blocks that can be found in host memory, sum over ranks.")},
    {COUNT(folder_blocks, KV, "folder_blocks"),
     METRIC("evicted_blocks_in_folder", gauge, "Blocks that can be found in the swap folder, sum over ranks.")},
    {COUNT(restored_blocks, KV, "restored_blocks")},
    {COUNT(stored_blocks, KV, "stored_blocks")},
    {COUNT(loaded_blocks, KV, "loaded_blocks")},
    {COUNT(folder_bytes_written, KV, "folder_bytes_written"),
     METRIC("swap_folder_written_bytes_total", counter, "Bytes of blocks written to the swap folder, sum over ranks.")},
    {COUNT(folder_bytes_read, KV, "folder_bytes_read"),
     METRIC("swap_folder_read_bytes_total", counter, "Bytes of blocks read from there, sum over ranks.")},
    {COUNT(ring_device_bytes, KV, "ring_device_bytes")},
    {COUNT(precise_bytes, KV, "precise_bytes"),
     METRIC("precise_tokens_bytes", gauge,
            "Bytes of a rank's cache for first tokens that are kept precise beside a quantised cache.")},
    {COUNT(ring_bytes_read, KV, "ring_bytes_read"),
     METRIC("host_cache_read_bytes_total", counter, "Bytes of a cache on the host that attention read, on all ranks.")},
    {REAL(ring_copy_s, KV, "ring_copy_ms", 1e3)},
    {REAL(ring_waited_s, KV, "ring_waited_ms", 1e3)},
    {COUNT(imported_tokens, KV, "imported_tokens"),
     METRIC("imported_tokens_total", counter, "Prompt tokens whose keys and values came from the store of blocks.")},
    {COUNT(exported_tokens, KV, "exported_tokens"),
     METRIC("exported_tokens_total", counter, "Prompt tokens whose keys and values were put into it.")},
    {COUNT(import_failures, KV, "import_failures"),
     METRIC("import_failures_total", counter,
            "Times that some of what a request was to import was not there, or damaged.")},
    {COUNT(cow_copies, KV, "cow_copies")},
    {ALONE(prefilled_tokens),
     METRIC("prompt_tokens_total", counter, "Prompt tokens of requests that have got their first token.")},
    {ALONE(output_tokens), METRIC("generation_tokens_total", counter, "Tokens of answers.")},
    {COUNT(drafted_chunks, DRAFTS, "num_drafts"),
     METRIC("spec_decode_num_drafts_total", counter, "Times that a step had drafts of a request.")},
    {COUNT(draft_tokens, DRAFTS, "draft_tokens"),
     METRIC("spec_decode_num_draft_tokens_total", counter, "Drafts in these steps.")},
    {COUNT(accepted_tokens, DRAFTS, "accepted_tokens"),
     METRIC("spec_decode_num_accepted_tokens_total", counter, "Of these, drafts that were right.")},
    {COUNT(verify_rows, VERIFY, "rows"),
     METRIC("verify_rows_total", counter, "Results that were checked against float64, on all ranks.")},
    {COUNT(verify_violations, VERIFY, "violations"),
     METRIC("verify_violations_total", counter, "Of these, results that were wrong.")},
    {COUNT(verify_undecided, VERIFY, "undecided")},
    {REAL(verify_max_error, VERIFY, "max_error", 1)},
    {REAL(verify_s, VERIFY, "seconds", 1)},
    {COUNT(selection_rows, VERIFY, "selection_rows")},
    {REAL(selection_mass_left_out_mean, VERIFY, "selection_mass_left_out_mean", 1),
     METRIC("selection_mass_left_out", gauge,
            "Mean share of the softmax of checked rows that lies on keys which were not chosen for them.")},
    {REAL(selection_mass_left_out_max, VERIFY, "selection_mass_left_out_max", 1),
     METRIC("selection_mass_left_out_max", gauge, "The largest such share.")},
    {COUNT(sparse_blocks_kept, CP, "sparse_blocks_kept"),
     METRIC("sparse_blocks_kept_total", counter, "Blocks of keys that prompts attend, where these are chosen.")},
    {COUNT(sparse_blocks_seen, CP, "sparse_blocks_seen"),
     METRIC("sparse_blocks_seen_total", counter, "Blocks of keys that they would attend otherwise.")},
    {COUNT(tiles_seen, CP, "tiles_seen"),
     METRIC("tiles_seen_total", counter, "Tiles of keys that attention looked at, where some may be left out.")},
    {COUNT(tiles_skipped, CP, "tiles_skipped"),
     METRIC("tiles_skipped_total", counter, "Of these, tiles left out as their scores cannot matter.")},
    {COUNT(sparse_bytes, CP, "sparse_bytes")},
    {REAL(sparse_s, CP, "sparse_s", 1)},
    {COUNT(sparse_blocks_busiest, CP, "sparse_blocks_busiest")},
    {COUNT(sparse_host_bytes, CP, "sparse_host_bytes"),
     METRIC("sparse_host_read_bytes_total", counter,
            "Bytes of keys on the host that were read to choose blocks of them, on all ranks.")},
    {COUNT(steps, CP, "steps")},
    {COUNT(graph_steps, CP, "graph_steps")},
    {REAL(graph_s, CP, "graph_s", 1)},
    {COUNT(chunks_pass_kv, CP, "pass_kv")},
    {COUNT(chunks_pass_q, CP, "pass_q")},
    {COUNT(bytes_sent, CP, "bytes_sent"),
     METRIC("exchange_bytes_total", counter, "Bytes that the ranks sent each other for attention, sum over ranks.")},
    {COUNT(row_bytes_sent, CP, "row_bytes_sent")},
    {COUNT(index_bytes_sent, CP, "index_bytes_sent")},
    {REAL(exposed_comm_s, CP, "exposed_comm_ms", 1e3),
     METRIC(
         "exposed_comm_seconds_total", counter,
         "Time that attention waited for messages, of the rank with the most; steps launched as graphs do not count.")},
    {REAL(imbalance, CP, "imbalance", 1),
     METRIC(
         "rank_imbalance", gauge,
         "Attention time of the busiest rank over the mean, since the start; 1: even; steps launched as graphs do not "
         "count.")},
    {COUNT(plain_rows, CP, "plain_rows"),
     METRIC(
         "attend_plain_rows_total", counter,
         "Rows that attention left to a kernel without tensor cores, once for each layer and range of keys, sum over "
         "ranks.")},
    {COUNT(staging_bytes, CP, "staging_bytes")},
    {REAL(planner_flops, CP, "flops", 1)},
    {REAL(planner_bandwidth, CP, "bandwidth", 1)},
    {REAL(planner_memory_bandwidth, CP, "memory_bandwidth", 1)},
    {REAL(planner_exchange_s, CP, "exchange_us", 1e6)},
    {COUNT(rank_local, CP, "rank_local")},
    {REAL(overlap_tokens, CP, "overlap_tokens", 1)},
    {REAL(predicted_attend_s, CP, "predicted_attend_s", 1)},
    {REAL(actual_attend_s, CP, "actual_attend_s", 1)},
};
const int cpa_n_figures = sizeof cpa_figures / sizeof cpa_figures[0];

int64_t cpa_figure_count(const cpa_figure *figure, const cpa_engine_stats *stats) {
    return *(const int64_t *)(const void *)((const char *)stats + figure->offset);
}

double cpa_figure_value(const cpa_figure *figure, const cpa_engine_stats *stats) {
    if (!figure->is_real) return (double)cpa_figure_count(figure, stats);
    return *(const double *)(const void *)((const char *)stats + figure->offset);
}

double cpa_figure_share_of_blocks(const cpa_engine_stats *s) {
    double used = s->kv_blocks > 0 ? (double)s->kv_used / (double)s->kv_blocks : 0;
    for (int32_t g = 0; g < s->kv_groups; g++)
        used = fmax(used, (double)s->kv_group[g].used / (double)s->kv_group[g].blocks);
    return used;
}
