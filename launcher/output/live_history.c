#include "launcher/output/live_history.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/output/figures.h"

struct cpa_live_history {
    pthread_mutex_t lock;
    cpa_live_figures figures; /* guarded by the lock */
};

cpa_live_history *cpa_live_history_create(int32_t ranks, double now_s) {
    cpa_live_history *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    pthread_mutex_init(&h->lock, NULL);
    h->figures.n_ranks = ranks;
    h->figures.start_s = now_s;
    return h;
}

void cpa_live_history_release(cpa_live_history *h) {
    if (!h) return;
    pthread_mutex_destroy(&h->lock);
    free(h);
}

/* The values of the period of a moment, which begin as those of the last one. */
static double *values_at(cpa_live_figures *f, double now_s) {
    const int64_t period = (int64_t)((now_s - f->start_s) / CPA_LIVE_PERIOD_S);
    cpa_live_sample *last = &f->samples[(f->n_samples + CPA_LIVE_SAMPLES - 1) % CPA_LIVE_SAMPLES];
    if (f->n_samples > 0 && last->period >= period) return last->values;
    cpa_live_sample *next = &f->samples[f->n_samples % CPA_LIVE_SAMPLES];
    if (f->n_samples > 0) *next = *last;
    next->period = period;
    f->n_samples++;
    return next->values;
}

static void add_latency(cpa_live_latencies *latencies, double seconds) {
    latencies->ms[latencies->added++ % CPA_LIVE_LATENCIES] = 1e3 * seconds;
}

void cpa_live_history_add_result(cpa_live_history *h, const cpa_request_result *result, double now_s) {
    const double ttft_s = result->first_token_s - result->arrival_s;
    if (result->output_tokens == 0 || (result->reason != CPA_FINISH_LENGTH && result->reason != CPA_FINISH_STOP))
        return;
    const int64_t gaps = result->output_tokens - 1, first = gaps > CPA_LIVE_LATENCIES ? gaps - CPA_LIVE_LATENCIES : 0;
    pthread_mutex_lock(&h->lock);
    double *values = values_at(&h->figures, now_s);
    values[CPA_LIVE_COMPLETED]++;
    values[CPA_LIVE_TTFT_S] += ttft_s;
    values[CPA_LIVE_E2E_S] += result->finish_s - result->arrival_s;
    add_latency(&h->figures.ttft, ttft_s);
    for (int64_t i = first; i < gaps; i++) add_latency(&h->figures.itl, result->token_s[i + 1] - result->token_s[i]);
    pthread_mutex_unlock(&h->lock);
}

void cpa_live_history_add_step(cpa_live_history *h, const cpa_engine_stats *s, double now_s) {
    pthread_mutex_lock(&h->lock);
    double *values = values_at(&h->figures, now_s);
    values[CPA_LIVE_RUNNING] = (double)s->requests_running;
    values[CPA_LIVE_WAITING] = (double)s->requests_waiting;
    values[CPA_LIVE_CACHE] = cpa_figure_share_of_blocks(s);
    values[CPA_LIVE_OUTPUT_TOKENS] = (double)s->output_tokens;
    values[CPA_LIVE_PROMPT_TOKENS] = (double)s->prefilled_tokens;
    values[CPA_LIVE_BYTES_SENT] = (double)s->bytes_sent;
    values[CPA_LIVE_EXPOSED_COMM_S] = s->exposed_comm_s;
    values[CPA_LIVE_VERIFY_ROWS] = (double)s->verify_rows;
    values[CPA_LIVE_VIOLATIONS] = (double)s->verify_violations;
    pthread_mutex_unlock(&h->lock);
}

void cpa_live_history_add_rank(cpa_live_history *h, int32_t rank, const cpa_rank_stats *stats,
                               const int64_t *bytes_to) {
    pthread_mutex_lock(&h->lock);
    cpa_live_rank *of = &h->figures.ranks[rank];
    if (stats->steps > of->last.steps) {
        of->steps[of->told++ % CPA_LIVE_STEPS] = (cpa_live_step){
            .begin_s = stats->step_begin_s,
            .end_s = stats->step_end_s,
            .attend_s = stats->attend_s - of->last.attend_s,
            .wait_s = stats->exposed_comm_s - of->last.exposed_comm_s,
            .graph_s = stats->graph_s - of->last.graph_s,
        };
        of->last = *stats;
    }
    memcpy(h->figures.bytes[rank], bytes_to, (size_t)h->figures.n_ranks * sizeof *bytes_to);
    pthread_mutex_unlock(&h->lock);
}

cpa_live_figures *cpa_live_history_copy(cpa_live_history *h) {
    cpa_live_figures *copy = malloc(sizeof *copy);
    if (!copy) return NULL;
    pthread_mutex_lock(&h->lock);
    *copy = h->figures;
    pthread_mutex_unlock(&h->lock);
    return copy;
}

const cpa_live_sample *cpa_live_figures_at(const cpa_live_figures *f, int64_t period) {
    int64_t low = f->n_samples > CPA_LIVE_SAMPLES ? f->n_samples - CPA_LIVE_SAMPLES : 0, high = f->n_samples;
    const int64_t first = low;
    while (low < high) { /* samples below `low` are not later than the period, those from `high` on are */
        const int64_t middle = low + (high - low) / 2;
        if (f->samples[middle % CPA_LIVE_SAMPLES].period <= period) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > first ? &f->samples[(low - 1) % CPA_LIVE_SAMPLES] : NULL;
}
