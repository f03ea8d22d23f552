/* topk: a row is one item. The cut is found first, then columns are taken as they come. */
#include <math.h>

#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/topk_cut.h"

typedef struct scored_row {
    const float *logits;
    cpa_topk_row row;
} scored_row;

static uint32_t order_at(const void *ctx, int64_t i) {
    const scored_row *of = ctx;
    const int32_t column = of->row.first + (int32_t)i;
    return cpa_topk_column_order(of->row, column, of->logits[column]);
}

static void choose_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_topk_args *a = ctx;
    const scored_row of = {a->logits + row * a->logits_stride, cpa_topk_row_of(a, row)};
    const int64_t n = of.row.end - of.row.first, to = cpa_topk_out_row(a->out_rows, row);
    (void)thread;
    if (to < 0) return;
    int32_t *indices = a->indices + to * a->indices_stride, count = 0;
    float *scores = a->scores ? a->scores + to * a->scores_stride : NULL;
    cpa_topk_cut cut = cpa_topk_find_cut(order_at, &of, n, a->k);
    for (int64_t i = 0; i < n; i++) {
        if (!cpa_topk_takes(&cut, order_at(&of, i))) continue;
        const int32_t column = of.row.first + (int32_t)i;
        indices[count] = cpa_topk_index(a, row, column);
        if (scores) scores[count] = cpa_topk_score(of.logits[column]);
        count++;
    }
    const int32_t tail = cpa_topk_tail(a->tails, row);
    if (tail >= 0) indices[count++] = tail;
    if (a->counts) a->counts[to] = count;
    for (; count < cpa_topk_list_width(a->k, a->tails); count++) {
        indices[count] = -1;
        if (scores) scores[count] = -INFINITY;
    }
}

cpa_status cpa_host_topk(const cpa_topk_args *args, cpa_stream *stream) {
    cpa_topk_args copy = *args;
    cpa_host_run(stream, args->rows, choose_row, &copy);
    return CPA_OK;
}
