#include "src/context/latent_work.h"

#include <math.h>

cpa_latent_load cpa_latent_load_of(int64_t tokens, int64_t cached, int32_t row_ranks, int32_t key_ranks) {
    const double rows = (double)tokens / row_ranks;
    return (cpa_latent_load){.rows = rows,
                             .keys = (double)(cached + tokens) / key_ranks,
                             .pairs = rows * ((double)cached + (double)(tokens + 1) / 2) / key_ranks};
}

static double longer(double flops, double bytes) {
    return fmax(flops, CPA_FLOPS_A_BYTE * bytes);
}

int cpa_latents_are_absorbed(const cpa_attention_shape *cache, const cpa_attention_shape *expanded,
                             cpa_latent_load load) {
    const double latent = cache->v_dim, rope = cache->k_dim - cache->v_dim, heads = expanded->q_heads;
    const double columns = (double)expanded->k_dim + expanded->v_dim, made = columns - rope;
    const double row = (double)cpa_shape_row_bytes(cache, CPA_KEYS);
    const double head_bytes = heads * columns * (double)cpa_dtype_bytes(expanded->dtype);
    const double expansion = longer(2 * heads * made * latent * load.keys, (row + head_bytes) * load.keys);
    const double over_heads = longer(2 * heads * columns * load.pairs, head_bytes * load.keys);
    const double folds = 2 * heads * made * latent * load.rows;
    const double over_latents = longer(2 * heads * (2 * latent + rope) * load.pairs, row * load.keys);
    return folds + over_latents < expansion + over_heads;
}
