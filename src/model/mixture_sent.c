#include "src/model/mixture_sent.h"

#include <cpattn/experts.h>
#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "comm/limits.h"
#include "kernels/device.h"

/* What travels in a piece. */
typedef struct traffic {
    int64_t to[CPA_COMM_MAX_RANKS], from[CPA_COMM_MAX_RANKS]; /* rows */
    int64_t arrivals;                                         /* sum of `from` */
    int rows_left;                                            /* on some rank, for the next piece */
} traffic;

cpa_status cpa_mixture_check_sent(const cpa_device *device, cpa_error *err) {
    if (!device->caps.own_memory && !device->caps.asynchronous) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "rows that are sent to their experts: found %s, supported is the host",
                    device->description);
}

static cpa_status permute(int64_t rows, int32_t top_k, const int32_t *ids, cpa_slice experts,
                          const cpa_sorted_choices *out, cpa_stream *stream) {
    const cpa_expert_permute_args args = {
        .size = sizeof args,
        .rows = rows,
        .top_k = top_k,
        .first_expert = (int32_t)experts.begin,
        .experts = (int32_t)experts.count,
        .ids = ids,
        .offsets = out->offsets,
        .tokens = out->tokens,
        .places = out->places,
    };
    return cpa_expert_permute(&args, stream);
}

/* out [rows, hidden] = the rows of a table that the indices name. */
static cpa_status gather(const cpa_mixture *m, const void *table, int64_t table_rows, const void *indices, int64_t rows,
                         void *out, cpa_stream *stream) {
    const cpa_embed_args args = {
        .size = sizeof args,
        .rows = rows,
        .width = m->config->hidden,
        .dtype = m->dtype,
        .vocabulary = table_rows,
        .table = table,
        .tokens = indices,
        .out = out,
    };
    return rows > 0 ? cpa_embed(&args, stream) : CPA_OK; /* of no table at all */
}

static cpa_status exchange(const cpa_row_exchange *with, int64_t row_bytes, const int64_t *to, const int64_t *from,
                           const void *send, void *receive, cpa_stream *stream) {
    const cpa_row_exchange_args args = {.size = sizeof args,
                                        .row_bytes = row_bytes,
                                        .send_rows = to,
                                        .receive_rows = from,
                                        .send = send,
                                        .receive = receive};
    return with->exchange(with->ctx, &args, stream);
}

/* Tells every rank how many rows its experts get, and lists the experts of those that come, rank after rank. */
static cpa_status agree(const cpa_mixture *m, const cpa_row_exchange *with, int rows_left, traffic *out,
                        cpa_stream *stream) {
    int64_t told[CPA_MOST_EXPERTS + CPA_COMM_MAX_RANKS], heard[CPA_MOST_EXPERTS + 2 * CPA_COMM_MAX_RANKS];
    int64_t to[CPA_COMM_MAX_RANKS], from[CPA_COMM_MAX_RANKS], *at = told;
    const int32_t *offsets = m->choices.offsets;
    for (int32_t r = 0; r < with->ranks; r++) {
        const cpa_slice experts = cpa_own_experts(m->config->moe.experts, with->ranks, r);
        for (int64_t e = experts.begin; e < experts.begin + experts.count; e++) *at++ = offsets[e + 1] - offsets[e];
        *at++ = rows_left;
        to[r] = experts.count + 1;
        from[r] = m->held.count + 1;
        out->to[r] = offsets[experts.begin + experts.count] - offsets[experts.begin];
    }
    CPA_TRY(exchange(with, sizeof *told, to, from, told, heard, stream));
    out->arrivals = 0;
    out->rows_left = 0;
    for (int32_t r = 0; r < with->ranks; r++) {
        const int64_t *counts = heard + r * (m->held.count + 1), before = out->arrivals;
        for (int64_t e = 0; e < m->held.count; e++)
            for (int64_t i = 0; i < counts[e]; i++) m->arrived_ids[out->arrivals++] = (int32_t)(m->held.begin + e);
        out->from[r] = out->arrivals - before;
        out->rows_left |= counts[m->held.count] != 0;
    }
    return CPA_OK;
}

/* What this rank's experts give for the rows that have arrived, in their places. */
static cpa_status run_arrivals(const cpa_mixture *m, const cpa_feed_forward_weights *w, int64_t rows,
                               cpa_stream *stream) {
    CPA_TRY(permute(rows, 1, m->arrived_ids, m->held, &m->arrivals, stream));
    CPA_TRY(cpa_mixture_multiply(m, w, m->held, &m->arrivals, rows, m->arrived, rows, NULL, stream));
    return gather(m, m->wide, rows, m->arrivals.places, rows, m->arrived, stream);
}

/* The rows of this piece, from `first` on, of this rank, and what its experts give for those of others. */
static cpa_status run_piece(const cpa_mixture *m, const cpa_feed_forward_weights *w, const cpa_mixture_rows *at,
                            int64_t first, int64_t rows, traffic *goes, cpa_stream *stream) {
    const cpa_moe_config *moe = &m->config->moe;
    const cpa_row_exchange *with = at->step->row_exchange;
    const int64_t row = m->config->hidden * cpa_dtype_bytes(m->dtype), places = rows * moe->top_k;
    const void *x = (const char *)at->x + first * row;
    const cpa_expert_combine_args combine = {
        .size = sizeof combine,
        .rows = rows,
        .top_k = moe->top_k,
        .width = m->config->hidden,
        .dtype = m->dtype,
        .y_dtype = m->dtype,
        .y = m->sorted,
        .y_rows = places,
        .places = m->choices.places,
        .weights = m->weights,
        .out = (char *)at->out + first * row,
        .shared = at->added ? (const char *)at->added + first * row : NULL,
    };
    CPA_TRY(cpa_mixture_route(m, w, x, rows, stream));
    CPA_TRY(permute(rows, moe->top_k, m->ids, (cpa_slice){0, moe->experts}, &m->choices, stream));
    CPA_TRY(gather(m, x, rows, m->choices.tokens, places, m->sorted, stream));
    CPA_TRY(agree(m, with, at->step->rows.count > first + rows, goes, stream));
    CPA_TRY(exchange(with, row, goes->to, goes->from, m->sorted, m->arrived, stream));
    if (goes->arrivals > 0) CPA_TRY(run_arrivals(m, w, goes->arrivals, stream));
    CPA_TRY(exchange(with, row, goes->from, goes->to, m->arrived, m->sorted, stream));
    return cpa_expert_combine(&combine, stream);
}

cpa_status cpa_mixture_run_sent(const cpa_mixture *m, const cpa_feed_forward_weights *w, const cpa_mixture_rows *at,
                                cpa_stream *stream) {
    const int64_t rows = at->step->rows.count;
    traffic goes = {.rows_left = 1};
    for (int64_t first = 0; goes.rows_left; first = cpa_min64(first + m->piece, rows))
        CPA_TRY(run_piece(m, w, at, first, cpa_min64(m->piece, rows - first), &goes, stream));
    return CPA_OK;
}
