/* block_union on the host: a KV head is one item. */
#include <string.h>

#include "kernels/host/device/host.h"
#include "kernels/operators.h"

static void add_row(const cpa_block_union_args *a, int64_t row, int32_t kv_head, uint32_t *out) {
    const cpa_key_blocks *of = &a->blocks;
    const int64_t words = cpa_mask_words(of->width), word = cpa_block_union_word(a, row);
    const int32_t group = a->q_heads / a->kv_heads;
    for (int64_t w = 0; w < words; w++) {
        uint32_t bits = word < 0 ? ~0u : 0;
        for (int32_t head = kv_head * group; word >= 0 && head < (kv_head + 1) * group; head++)
            bits |= of->bits[word + head * of->head_stride + w];
        out[w] |= bits & cpa_block_union_all(of->width, w);
    }
}

static void unite(void *ctx, int64_t kv_head, int32_t thread) {
    const cpa_block_union_args *a = ctx;
    const int64_t words = cpa_mask_words(a->blocks.width);
    (void)thread;
    for (int64_t set = 0; set < a->sets; set++)
        memset(a->out + (set * a->kv_heads + kv_head) * words, 0, (size_t)words * sizeof *a->out);
    for (int64_t row = 0; row < a->rows; row++)
        if (a->set[row] >= 0 && cpa_block_union_is_new(a, row))
            add_row(a, row, (int32_t)kv_head, a->out + (a->set[row] * a->kv_heads + kv_head) * words);
}

cpa_status cpa_host_block_union(const cpa_block_union_args *args, cpa_stream *stream) {
    cpa_block_union_args copy = *args;
    cpa_host_run(stream, args->kv_heads, unite, &copy);
    return CPA_OK;
}
