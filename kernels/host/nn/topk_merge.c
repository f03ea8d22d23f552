/* topk_merge: a row is one item. The cut is found over the candidates of all lists, which are then walked in the order of
 * their indices. */
#include <cpattn/ops.h>

#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/topk_cut.h"

typedef struct candidates {
    const cpa_topk_merge_args *args;
    int64_t row;
} candidates;

static int64_t place_of(const candidates *of, int32_t list, int32_t entry) {
    return list * of->args->list_stride + of->row * of->args->row_stride + entry;
}

static uint32_t order_at(const void *ctx, int64_t i) {
    const candidates *of = ctx;
    const int32_t width = of->args->width;
    const int64_t at = place_of(of, (int32_t)(i / width), (int32_t)(i % width));
    return cpa_topk_candidate_order(of->args, of->row, of->args->indices[at], of->args->scores[at]);
}

/* The list whose next entry has the smallest index; -1 if all have ended. */
static int32_t next_list(const candidates *of, const int32_t *next) {
    int32_t best = -1, best_index = 0;
    for (int32_t list = 0; list < of->args->n; list++) {
        if (next[list] == of->args->width) continue;
        const int32_t index = of->args->indices[place_of(of, list, next[list])];
        if (index >= 0 && (best < 0 || index < best_index)) best = list, best_index = index;
    }
    return best;
}

static void merge_row(void *ctx, int64_t row, int32_t thread) {
    const candidates of = {ctx, row};
    const cpa_topk_merge_args *a = of.args;
    const int64_t to = cpa_topk_out_row(a->out_rows, row);
    int32_t next[CPA_MERGE_MAX_STATES] = {0}, count = 0, list;
    (void)thread;
    if (to < 0) return;
    int32_t *out = a->out + to * a->out_stride;
    cpa_topk_cut cut = cpa_topk_find_cut(order_at, &of, (int64_t)a->n * a->width, a->k);
    while (count < a->k && (list = next_list(&of, next)) >= 0) {
        const int32_t entry = next[list]++;
        if (cpa_topk_takes(&cut, order_at(&of, (int64_t)list * a->width + entry)))
            out[count++] = a->indices[place_of(&of, list, entry)];
    }
    const int32_t tail = cpa_topk_tail(a->tails, row);
    if (tail >= 0) out[count++] = tail;
    if (a->counts) a->counts[to] = count;
    for (; count < cpa_topk_list_width(a->k, a->tails); count++) out[count] = -1;
}

cpa_status cpa_host_topk_merge(const cpa_topk_merge_args *args, cpa_stream *stream) {
    cpa_topk_merge_args copy = *args;
    cpa_host_run(stream, args->rows, merge_row, &copy);
    return CPA_OK;
}
