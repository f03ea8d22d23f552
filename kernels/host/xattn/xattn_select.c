/* xattn_select: a block row of a head is one item. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/xattn.h"

typedef struct candidate {
    float sum;
    int32_t block;
} candidate;

static int largest_first(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->sum != b->sum) return a->sum < b->sum ? 1 : -1;
    return a->block < b->block ? -1 : 1;
}

static void keep(uint32_t *bits, int32_t block) {
    bits[block / 32] |= 1u << block % 32;
}

/* Of the others those that are needed; returns how many, and adds what they have to *sum. */
static int32_t keep_others(uint32_t *bits, candidate *others, int32_t n, double share, double *sum, double *total) {
    int32_t count = 0;
    qsort(others, (size_t)n, sizeof *others, largest_first);
    *total = *sum;
    for (int32_t i = 0; i < n; i++) *total += others[i].sum;
    const double need = share * *total;
    for (; count < n && *sum < need; count++) {
        keep(bits, others[count].block);
        *sum += others[count].sum;
    }
    return count;
}

static void select_row(void *ctx, int64_t item, int32_t thread) {
    const cpa_xattn_select_args *a = ctx;
    const int64_t head = item / a->q_blocks;
    const cpa_xattn_row row = cpa_xattn_row_of(a, item % a->q_blocks);
    const float *sums = a->sums + item * a->row_stride;
    uint32_t *bits = a->bits + head * a->bits_stride + item % a->q_blocks * a->words;
    candidate others[CPA_XATTN_MOST_BLOCKS];
    (void)thread;
    double kept = 0, total;
    int32_t n = 0, count = 0, is_number = 1;
    memset(bits, 0, (size_t)a->words * sizeof *bits);
    for (int32_t block = 0; block < row.end; block++) {
        const float sum = sums[cpa_xattn_sum_at(a, block)];
        is_number &= !isnan(sum);
        if (block < row.first || block >= row.last) {
            keep(bits, block);
            kept += sum;
            count++;
        } else {
            others[n++] = (candidate){sum, block};
        }
    }
    if (is_number) {
        count += keep_others(bits, others, n, (double)(a->taus ? a->taus[head] : a->tau), &kept, &total);
    } else {
        for (int32_t i = 0; i < n; i++) keep(bits, others[i].block);
        count += n, kept = total = 1;
    }
    if (a->counts) a->counts[item] = count;
    if (a->kept) a->kept[item] = total > 0 ? (float)(kept / total) : 1;
}

cpa_status cpa_host_xattn_select(const cpa_xattn_select_args *args, cpa_stream *stream) {
    cpa_xattn_select_args copy = *args;
    cpa_host_run(stream, args->shape.q_heads * args->q_blocks, select_row, &copy);
    return CPA_OK;
}
