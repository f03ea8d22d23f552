#include "kernels/cuda/attend_split.h"

#include "kernels/cuda/attend.h"

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

int64_t cpa_cuda_prefill_tiles(const cpa_attend_batch *batch, const cpa_attend_item *item, int32_t tile_rows) {
    const int64_t rows = item->q_count * (batch->q_heads / batch->kv_heads);
    return rows <= CPA_CUDA_DECODE_ROWS ? 0 : ceil_div(rows, tile_rows);
}

int64_t cpa_cuda_prefill_pieces(const cpa_attend_batch *batch, int32_t tile_rows, int64_t split_keys) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t cuts = ceil_div(batch->items[i].k_count, split_keys);
        pieces += cpa_cuda_prefill_tiles(batch, &batch->items[i], tile_rows) * (cuts > 0 ? cuts : 1);
    }
    return pieces;
}

/* By bisection: longer pieces are never more of them. */
int64_t cpa_cuda_least_split(const cpa_attend_batch *batch, int32_t tile_rows, int64_t least, int64_t most,
                             int64_t most_pieces) {
    while (least < most) {
        const int64_t middle = least + (most - least) / 2;
        if (cpa_cuda_prefill_pieces(batch, tile_rows, middle * CPA_CUDA_PREFILL_KEYS) <= most_pieces) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    return least;
}
