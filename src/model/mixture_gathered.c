#include "src/model/mixture_gathered.h"

#include "base/check.h"
#include "base/min_max.h"
#include "comm/limits.h"
#include "kernels/device.h"
#include "kernels/operators.h"

/* What travels in a piece: each way all of what a rank with rows and a rank with experts have to do with each other. */
typedef struct traffic {
    int64_t own;                     /* rows of this rank */
    int64_t out[CPA_COMM_MAX_RANKS]; /* own rows that a rank gets, and sums for them that it sends back */
    int64_t in[CPA_COMM_MAX_RANKS];  /* rows that a rank sends, and sums for them that it gets back */
    int64_t all;                     /* sum of `in` */
    int32_t parts;                   /* ranks that have experts */
} traffic;

static int64_t rows_at(const cpa_mixture *m, const cpa_model_step *step, int32_t rank, int64_t first) {
    return cpa_min64(m->piece, cpa_max64(step->rank_rows[rank] - first, 0));
}

static int has_experts(const cpa_mixture *m, int32_t ranks, int32_t rank) {
    return cpa_own_experts(m->config->moe.experts, ranks, rank).count > 0;
}

/* Of the rows from `first` on, of each rank. */
static traffic traffic_of(const cpa_mixture *m, const cpa_model_step *step, int64_t first) {
    const int32_t ranks = step->row_exchange->ranks, rank = step->row_exchange->rank;
    traffic goes = {.own = rows_at(m, step, rank, first)};
    for (int32_t r = 0; r < ranks; r++) {
        goes.out[r] = has_experts(m, ranks, r) ? goes.own : 0;
        goes.in[r] = m->held.count > 0 ? rows_at(m, step, r, first) : 0;
        goes.all += goes.in[r];
        goes.parts += has_experts(m, ranks, r);
    }
    return goes;
}

/* Rows of all ranks to m->gathered. */
static cpa_status gather(const cpa_mixture *m, const cpa_row_exchange *with, const traffic *goes, const void *x,
                         cpa_stream *stream) {
    const cpa_row_exchange_args args = {.size = sizeof args,
                                        .row_bytes = m->config->hidden * cpa_dtype_bytes(m->dtype),
                                        .send_rows = goes->out,
                                        .receive_rows = goes->in,
                                        .send = x,
                                        .receive = m->gathered,
                                        .to_all = 1};
    return with->exchange(with->ctx, &args, stream);
}

/* The sums in m->part to the ranks of their rows, and those for own rows to m->received, one rank with experts behind
 * the other. */
static cpa_status give_back(const cpa_mixture *m, const cpa_row_exchange *with, const traffic *goes,
                            cpa_stream *stream) {
    const cpa_row_exchange_args args = {.size = sizeof args,
                                        .row_bytes = m->config->hidden * (int64_t)sizeof *m->part,
                                        .send_rows = goes->in,
                                        .receive_rows = goes->out,
                                        .send = m->part,
                                        .receive = m->received};
    return with->exchange(with->ctx, &args, stream);
}

/* All own rows as one, to which `added` is the bias. */
static cpa_status add_up(const cpa_mixture *m, const traffic *goes, const void *added, void *out, cpa_stream *stream) {
    const int64_t elements = goes->own * m->config->hidden;
    const float *parts[CPA_COMM_MAX_RANKS];
    for (int32_t i = 0; i < goes->parts; i++) parts[i] = m->received + i * elements;
    const cpa_sum_parts_args sum = {.rows = 1,
                                    .width = (int32_t)elements,
                                    .n_parts = goes->parts,
                                    .parts = parts,
                                    .bias = added,
                                    .dtype = m->dtype,
                                    .out = out};
    return goes->own > 0 ? stream->device->operators->sum_parts(&sum, stream) : CPA_OK;
}

static cpa_status run_piece(const cpa_mixture *m, const cpa_feed_forward_weights *w, const cpa_mixture_rows *at,
                            int64_t first, cpa_stream *stream) {
    const cpa_row_exchange *with = at->step->row_exchange;
    const int64_t before = cpa_min64(first, at->step->rows.count) * m->config->hidden * cpa_dtype_bytes(m->dtype);
    const traffic goes = traffic_of(m, at->step, first);
    const cpa_mixture_piece piece = {.rows = goes.all, .x = m->gathered, .out = m->part, .dtype = CPA_F32};
    CPA_TRY(gather(m, with, &goes, (const char *)at->x + before, stream));
    if (goes.all > 0) CPA_TRY(cpa_mixture_compute(m, w, m->held, &piece, stream));
    CPA_TRY(give_back(m, with, &goes, stream));
    return add_up(m, &goes, at->added ? (const char *)at->added + before : NULL, (char *)at->out + before, stream);
}

cpa_status cpa_mixture_run_gathered(const cpa_mixture *m, const cpa_feed_forward_weights *w, const cpa_mixture_rows *at,
                                    cpa_stream *stream) {
    int64_t most = 0;
    for (int32_t r = 0; r < at->step->row_exchange->ranks; r++) most = cpa_max64(most, at->step->rank_rows[r]);
    for (int64_t first = 0; first < most; first += m->piece) CPA_TRY(run_piece(m, w, at, first, stream));
    return CPA_OK;
}
