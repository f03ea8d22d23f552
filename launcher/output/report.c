#include "launcher/output/report.h"

#include <inttypes.h>
#include <string.h>

#include "program/field.h"
#include "program/links.h"
#include "program/metrics_report.h"
#include "program/report_line.h"

/* Bytes with a unit that leaves one to four digits before the point. */
static const char *bytes_text(double bytes, char *out, size_t size) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 4) {
        bytes /= 1024;
        unit++;
    }
    snprintf(out, size, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}

cpa_cache_bytes_used cpa_outcome_cache_bytes(const cpa_outcome *outcome) {
    cpa_cache_bytes_used bytes = {0, 0};
    for (int32_t g = 0; g < outcome->stats.kv_groups; g++) {
        const cpa_engine_kv_group *group = &outcome->stats.kv_group[g];
        bytes.all += group->blocks * group->block_bytes;
        bytes.peak += group->peak * group->block_bytes;
    }
    return bytes;
}

/* What carries tensors and what joins the ranks; and what of the environment has a say in it. */
static void print_links(const cpa_outcome *outcome, FILE *out) {
    char text[512], told[512] = "";
    const char *name, *value;
    if (!outcome->links || outcome->cp_size == 1) return;
    cpa_report_line(out, "links", "%s",
                    cpa_links_describe(outcome->transport, outcome->links, outcome->cp_size, text, sizeof text));
    for (int i = 0; (name = cpa_links_variable(outcome->transport, i, &value)) != NULL; i++) {
        const size_t used = strlen(told);
        char shown[65];
        cpa_text_quote(value, strlen(value), shown, sizeof shown);
        snprintf(told + used, sizeof told - used, " %s=%s", name, shown);
    }
    if (told[0]) cpa_report_line(out, "", "%s chooses by%s", outcome->transport, told);
}

/* The group of the first tokens that are precise; NULL: none are. */
static const cpa_engine_kv_group *precise_group(const cpa_engine_stats *stats) {
    return stats->precise_bytes > 0 ? &stats->kv_group[stats->kv_groups - 1] : NULL;
}

void cpa_report_place(const cpa_outcome *outcome, FILE *out) {
    const cpa_model_shape shape = cpa_model_shape_of(outcome->model);
    const cpa_engine_kv_group *precise = precise_group(&outcome->stats);
    char model[256], cache[32], others[48] = "", first[48] = "";
    int32_t left = 0;
    for (int32_t layer = 0; layer < shape.layers; layer++) left += cpa_model_leaves_layer(&shape, layer);
    cpa_model_describe(outcome->model, model, sizeof model);
    bytes_text((double)cpa_outcome_cache_bytes(outcome).all, cache, sizeof cache);
    fprintf(out, "cp_attn %s\n", cpa_version());
    cpa_report_line(out, "device", "%d rank%s: %s", outcome->cp_size, outcome->cp_size == 1 ? "" : "s",
                    outcome->device);
    print_links(outcome, out);
    cpa_report_line(out, "model", "%s", model);
    if (left > 0)
        snprintf(others, sizeof others, ", %d of %d layers %s", left, shape.layers,
                 cpa_dtype_name(shape.attention.dtype));
    if (precise)
        snprintf(first, sizeof first, ", first %" PRId64 " tokens %s", precise->sinks,
                 cpa_dtype_name(shape.attention.dtype));
    cpa_report_line(out, "cache", "%" PRId64 " blocks of %" PRId64 " tokens a rank (%s, %s%s%s), interleave %" PRId64,
                    outcome->stats.kv_blocks, outcome->settings->block_size, cache,
                    cpa_dtype_name(shape.attention.kv_dtype), others, first, outcome->interleave);
}

void cpa_report_preamble(const cpa_outcome *outcome, FILE *out) {
    const cpa_settings *settings = outcome->settings;
    cpa_report_place(outcome, out);
    cpa_report_line(out, "run", "%s", outcome->workload->title);
    char checked[96] = "as many results as 2% of the time pays for are checked against float64";
    if (settings->verify >= 0)
        snprintf(checked, sizeof checked, "%g of all results are checked against float64", settings->verify);
    if (settings->dry_run) snprintf(checked, sizeof checked, "planned, not computed");
    cpa_report_line(out, "", "%" PRId64 " prompt and %" PRId64 " output tokens; %s", outcome->workload->prompt_tokens,
                    outcome->workload->output_tokens, checked);
}

static void print_requests(const cpa_outcome *outcome, FILE *out) {
    const cpa_metrics *done = outcome->metrics;
    cpa_report_line(out, "requests", "%" PRId64 " of %" PRId64 " completed in %.2f s and %" PRId64 " steps",
                    done->completed, outcome->workload->count, outcome->stats.duration_s, outcome->stats.steps);
    if (done->failed + done->cancelled + done->expired > 0)
        cpa_report_line(out, "", "%" PRId64 " failed, %" PRId64 " cancelled, %" PRId64 " expired", done->failed,
                        done->cancelled, done->expired);
    if (outcome->stats.graph_steps > 0)
        cpa_report_line(out, "", "%" PRId64 " steps as CUDA graphs, in %.2f s", outcome->stats.graph_steps,
                        outcome->stats.graph_s);
    cpa_metrics_print_throughput(done, outcome->stats.duration_s, out);
}

/* Which algorithm, and the rule that led to it: for T new tokens, pass-KV hides its exchange from overlap_tokens on. */
static void print_algorithm(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    cpa_algorithm chosen = (cpa_algorithm)outcome->settings->algorithm;
    cpa_report_line(out, "algorithm", "%s", stats->choices[0] ? stats->choices : "no chunk was computed");
    if (chosen != CPA_AUTO) return;
    if (outcome->cp_size == 1) return;
    cpa_report_line(out, "", "at %.2f GFLOP/s and %.2f GB/s a rank, pass-KV hides its exchange from %.0f new tokens on",
                    stats->planner_flops * 1e-9, stats->planner_bandwidth * 1e-9, stats->overlap_tokens);
    if (stats->planner_exchange_s > 0)
        cpa_report_line(out, "", "at %.0f GB/s of memory and %.1f us more for a decode layer that exchanges",
                        stats->planner_memory_bandwidth * 1e-9, stats->planner_exchange_s * 1e6);
    cpa_report_line(out, "", "attention predicted to take %.2f s, took %.2f s", stats->predicted_attend_s,
                    stats->actual_attend_s);
}

/* Of a run with drafts: how many were right, and how many tokens a step with them gave a request. */
static void print_drafts(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    if (stats->drafted_chunks == 0) return;
    const double chunks = (double)stats->drafted_chunks, accepted = (double)stats->accepted_tokens;
    cpa_report_line(out, "drafts",
                    "%" PRId64 " tokens, %" PRId64 " accepted (%.1f %%), %.2f tokens a request and step with drafts",
                    stats->draft_tokens, stats->accepted_tokens, 100 * accepted / (double)stats->draft_tokens,
                    (accepted + chunks) / chunks);
}

/* What has attended: single rows of a sequence, and several at once. */
static void print_kernels(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    const char *decode = stats->decode_kernels, *prefill = stats->prefill_kernels;
    if (decode[0] || prefill[0])
        cpa_report_line(out, "kernels", "%s%s%s%s%s", decode[0] ? "decode by " : "", decode,
                        decode[0] && prefill[0] ? "; " : "", prefill[0] ? "prefill by " : "", prefill);
    if (stats->plain_rows > 0)
        cpa_report_line(out, "plain kernels", "%" PRId64 " rows attended without tensor cores", stats->plain_rows);
}

static void print_exchange(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    char sent[32], staging[32], bound[32];
    bytes_text((double)stats->bytes_sent, sent, sizeof sent);
    bytes_text((double)stats->staging_bytes, staging, sizeof staging);
    bytes_text((double)stats->staging_bound, bound, sizeof bound);
    cpa_report_line(out, "exchange", "%s sent, staging %s of %s, waited for %.1f ms", sent, staging, bound,
                    stats->exposed_comm_s * 1e3);
    cpa_report_line(out, "imbalance", "%.2f, the busiest rank's attention time over the mean", stats->imbalance);
}

static void report_group(const cpa_outcome *outcome, const cpa_engine_kv_group *group, FILE *out) {
    const char *plural = group->layers == 1 ? "" : "s";
    char text[64] = "without a window", bytes[32];
    if (group != precise_group(&outcome->stats)) {
        if (group->window > 0) snprintf(text, sizeof text, "of window %" PRId64, group->window);
        cpa_report_line(out, "", "%d layer%s %s: peak %" PRId64 " of %" PRId64, group->layers, plural, text,
                        group->peak, group->blocks);
        return;
    }
    bytes_text((double)outcome->stats.precise_bytes, bytes, sizeof bytes);
    cpa_report_line(out, "", "first %" PRId64 " tokens in %s, %d layer%s: peak %" PRId64 " of %" PRId64 ", %s",
                    group->sinks, cpa_dtype_name(cpa_model_shape_of(outcome->model).attention.dtype), group->layers,
                    plural, group->peak, group->blocks, bytes);
}

/* Of each group of layers what it had of its own blocks, and of all together. */
static void report_groups(const cpa_outcome *outcome, FILE *out) {
    const cpa_cache_bytes_used bytes = cpa_outcome_cache_bytes(outcome);
    char peak[32], all[32];
    for (int32_t g = 0; g < outcome->stats.kv_groups; g++) report_group(outcome, &outcome->stats.kv_group[g], out);
    bytes_text((double)bytes.peak, peak, sizeof peak);
    bytes_text((double)bytes.all, all, sizeof all);
    cpa_report_line(out, "", "%s of %s at these peaks", peak, all);
}

static void report_folder(const cpa_engine_stats *stats, FILE *out) {
    char written[32], read[32];
    bytes_text((double)stats->folder_bytes_written, written, sizeof written);
    bytes_text((double)stats->folder_bytes_read, read, sizeof read);
    cpa_report_line(
        out, "", "swap folder: %" PRId64 " blocks were there, %" PRId64 " went there (%s), %" PRId64 " came back (%s)",
        stats->restored_blocks, stats->stored_blocks, written, stats->loaded_blocks, read);
}

/* What came from the host, how fast, and how much of the copying attention did not hide. */
static void report_ring(const cpa_engine_stats *stats, FILE *out) {
    char read[32], ring[32];
    bytes_text((double)stats->ring_bytes_read, read, sizeof read);
    bytes_text((double)stats->ring_device_bytes, ring, sizeof ring);
    cpa_report_line(out, "", "on the host: %s read through %s of device memory, at %.1f GB/s, waited for %.1f ms", read,
                    ring, stats->ring_copy_s > 0 ? (double)stats->ring_timed_bytes / stats->ring_copy_s * 1e-9 : 0,
                    stats->ring_waited_s * 1e3);
    if (stats->sparse_host_bytes == 0) return;
    bytes_text((double)stats->sparse_host_bytes, read, sizeof read);
    cpa_report_line(out, "", "on the host: %s of keys read to choose blocks of them", read);
}

void cpa_report_cache(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    cpa_report_line(out, "cache",
                    "peak %" PRId64 " of %" PRId64 " blocks on a rank, %" PRId64 " preemptions, %" PRId64 " evictions",
                    stats->kv_peak, stats->kv_blocks, stats->preemptions, stats->evictions);
    if (stats->kv_groups > 1) report_groups(outcome, out);
    double rate = stats->prefix_queries > 0 ? 100.0 * (double)stats->prefix_hits / (double)stats->prefix_queries : 0;
    cpa_report_line(out, "",
                    "%" PRId64 " of %" PRId64 " full prompt blocks found (%.1f %%), %" PRId64 " copied on write",
                    stats->prefix_hits, stats->prefix_queries, rate, stats->cow_copies);
    if (stats->keys_read < stats->keys_attended)
        cpa_report_line(out, "", "%.1f %% of the keys read that were attended, as requests shared them",
                        100.0 * (double)stats->keys_read / (double)stats->keys_attended);
    if (stats->cut_chunks > 0 || stats->held_back > 0)
        cpa_report_line(out, "", "%" PRId64 " prefill chunks cut to what was free, %" PRId64 " requests held back",
                        stats->cut_chunks, stats->held_back);
    if (stats->rank_local > 0)
        cpa_report_line(out, "", "%" PRId64 " times a sequence was placed on one rank", stats->rank_local);
    if (stats->imported_tokens > 0 || stats->exported_tokens > 0 || stats->import_failures > 0)
        cpa_report_line(out, "",
                        "%" PRId64 " prompt tokens came from the block store, %" PRId64 " went there; %" PRId64
                        " times not all was there",
                        stats->imported_tokens, stats->exported_tokens, stats->import_failures);
    if (stats->kept_blocks > 0 || stats->restored_blocks > 0)
        cpa_report_line(out, "",
                        "%" PRId64 " evicted blocks kept in host memory, %" PRId64 " fetched from there; %" PRId64
                        " damaged or not there",
                        stats->kept_blocks, stats->fetched_blocks, stats->damaged_blocks);
    if (stats->stored_blocks > 0 || stats->restored_blocks > 0) report_folder(stats, out);
    if (stats->ring_bytes_read > 0) report_ring(stats, out);
    if (stats->swapped_out > 0)
        cpa_report_line(out, "", "%" PRId64 " blocks swapped out, %" PRId64 " back in; %" PRId64 " times damaged",
                        stats->swapped_out, stats->swapped_in, stats->swap_failures);
}

void cpa_report_logits(const cpa_outcome *outcome, FILE *out) {
    const cpa_logits_verdict *logits = &outcome->logits;
    char turned[64] = "";
    if (logits->turned > 0)
        snprintf(turned, sizeof turned, ", %" PRId64 " right by another choice of experts", logits->turned);
    cpa_report_line(out, "logits",
                    "%" PRId64 " tokens compared with a plain forward, %" PRId64 " violations%s, largest error %.3g",
                    logits->tokens, logits->violations, turned, logits->max_error);
}

void cpa_report_print(const cpa_outcome *outcome, FILE *out) {
    const cpa_engine_stats *stats = &outcome->stats;
    fputc('\n', out);
    print_requests(outcome, out);
    cpa_metrics_print_latencies(outcome->metrics, out);
    if (outcome->given_up) {
        cpa_report_line(out, "stopped", "in the middle of a step: what the ranks count and check is not known");
        if (outcome->failure.status != CPA_OK) cpa_report_line(out, "error", "%s", outcome->failure.message);
        return;
    }
    print_algorithm(outcome, out);
    print_drafts(outcome, out);
    print_exchange(outcome, out);
    print_kernels(outcome, out);
    cpa_report_cache(outcome, out);
    cpa_report_line(out, "verified", "%" PRId64 " rows in %.3g s, %" PRId64 " violations, largest error %.3g",
                    stats->verify_rows, stats->verify_s, stats->verify_violations, stats->verify_max_error);
    if (stats->verify_undecided > 0)
        cpa_report_line(out, "", "%" PRId64 " of these rows undecided: their scores overflow", stats->verify_undecided);
    if (stats->selection_rows > 0)
        cpa_report_line(out, "",
                        "%" PRId64
                        " of these rows attend chosen keys, which leave out %.3g of their softmax on average, "
                        "%.3g at most",
                        stats->selection_rows, stats->selection_mass_left_out_mean, stats->selection_mass_left_out_max);
    if (stats->sparse_blocks_seen > 0) {
        const double kept = (double)stats->sparse_blocks_kept, busiest = (double)stats->sparse_blocks_busiest;
        cpa_report_line(out, "sparse", "prompts attend %.3g of the blocks of keys that they see, estimated in %.3g s",
                        kept / (double)stats->sparse_blocks_seen, stats->sparse_s);
        cpa_report_line(out, "", "the busiest rank attends %.2f times the mean of all",
                        busiest * outcome->cp_size / kept);
    }
    if (stats->tiles_seen > 0)
        cpa_report_line(out, "tiles", "%.3g of %" PRId64 " tiles of keys are left out",
                        (double)stats->tiles_skipped / (double)stats->tiles_seen, stats->tiles_seen);
    else if (outcome->settings->skip_tiles > 0)
        cpa_report_line(out, "tiles", "none are left out by the kernels that attended");
    if (outcome->checked_logits) cpa_report_logits(outcome, out);
    if (stats->nonfinite_rows > 0)
        cpa_report_line(
            out, "not finite", "%" PRId64 " rows; first request %" PRIu64 ", token %" PRId64 ", layer %" PRId32,
            stats->nonfinite_rows, stats->nonfinite_request, stats->nonfinite_position, stats->nonfinite_layer);
    cpa_report_line(out, "digest", "%016" PRIx64, stats->output_digest);
}
