/* Where the k largest of many 32-bit orders end, on the host: a histogram of their upper bits, then of the next ones of
 * those that have the upper ones that were found. */
#ifndef CPA_HOST_NN_TOPK_CUT_H
#define CPA_HOST_NN_TOPK_CUT_H

#include <string.h>

#include "kernels/topk.h"

/* Chosen are the orders above `order`, and `ties` of those that equal it: of a row with no more than k orders above
 * CPA_TOPK_NEVER, all of these. */
typedef struct cpa_topk_cut {
    uint32_t order;
    int64_t ties;
} cpa_topk_cut;

/* order_of(ctx, i) for i in [0, n). */
typedef uint32_t cpa_topk_orders(const void *ctx, int64_t i);

static inline cpa_topk_cut cpa_topk_find_cut(cpa_topk_orders *order_of, const void *ctx, int64_t n, int64_t k) {
    enum { LEVELS = 3, BINS = 2048 };
    static const int shifts[LEVELS] = {21, 10, 0}, bits[LEVELS] = {11, 11, 10};
    uint32_t bins[BINS], found = 0;
    int64_t wanted = k;
    for (int level = 0; level < LEVELS; level++) {
        memset(bins, 0, sizeof bins);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t order = order_of(ctx, i);
            if (order > CPA_TOPK_NEVER && (uint64_t)order >> (shifts[level] + bits[level]) == found)
                bins[(order >> shifts[level]) & ((1u << bits[level]) - 1)]++;
        }
        int32_t bin = (1 << bits[level]) - 1;
        while (bin >= 0 && bins[bin] < wanted) wanted -= bins[bin--];
        if (bin < 0) return (cpa_topk_cut){CPA_TOPK_NEVER, 0};
        found = found << bits[level] | (uint32_t)bin;
    }
    return (cpa_topk_cut){found, wanted};
}

/* Whether an order is chosen where those that equal the cut come one after the other. */
static inline int cpa_topk_takes(cpa_topk_cut *cut, uint32_t order) {
    return order > cut->order || (order == cut->order && cut->ties > 0 && cut->ties-- > 0);
}

#endif
