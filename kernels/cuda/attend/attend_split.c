#include "kernels/cuda/attend/attend_split.h"

#include "base/min_max.h"
#include "kernels/cuda/attend/attend_tokens.h"

/* Where rows of elements have the width of most heads and lie together, two warps walk through the same keys, each with
 * a tile of rows. Rows in runs are not short where they lie. */
cpa_cuda_attend_geometry cpa_cuda_decode_geometry(const cpa_attention_shape *shape, int32_t block_size) {
    if (cpa_cuda_is_wide(shape)) return (cpa_cuda_attend_geometry){.rows = CPA_CUDA_WIDE_ROWS, .heads = 1, .ctas = 1};
    const int codes = cpa_dtype_is_quantised(shape->kv_dtype), runs = shape->layout == CPA_VLLM_X;
    const cpa_cuda_width width = cpa_cuda_width_of(shape->k_dim, shape->v_dim);
    const int usual = width == CPA_CUDA_128 && !codes && !runs && block_size >= CPA_CUDA_DECODE_RUN;
    const int packed = cpa_dtype_is_turboquant(shape->kv_dtype); /* with a table in the CTA's shared memory */
    return (cpa_cuda_attend_geometry){
        .rows = usual ? 2 * CPA_CUDA_DECODE_ROWS : CPA_CUDA_DECODE_ROWS,
        .heads = runs ? 1 : cpa_cuda_decode_heads(shape, codes ? 1 : 2),
        .ctas = width <= CPA_CUDA_128 && !packed ? 2 : 1,
        .wide = usual,
    };
}

int32_t cpa_cuda_most_decode_rows(const cpa_attention_shape *shape, int32_t block_size) {
    return shape->v_in_k ? CPA_CUDA_MOST_DECODE_ROWS : cpa_cuda_decode_geometry(shape, block_size).rows;
}

/* Items of more rows than a CTA takes go faster through prefill tiles, outside of graphs; but a group that has more
 * would never come into one. */
int32_t cpa_cuda_most_padded_rows(const cpa_attention_shape *shape, int32_t block_size) {
    const int32_t most = cpa_cuda_most_decode_rows(shape, block_size);
    return shape->q_heads / shape->kv_heads <= most ? most : CPA_CUDA_MOST_DECODE_ROWS;
}

cpa_cuda_team cpa_cuda_team_of(const cpa_attention_shape *shape, int32_t block_size) {
    const int32_t tile = cpa_cuda_decode_geometry(shape, block_size).rows, group = shape->q_heads / shape->kv_heads;
    if (group <= tile) return (cpa_cuda_team){.ctas = 1, .tile = tile, .rows = tile};
    return (cpa_cuda_team){.ctas = (int32_t)cpa_cuda_ceil_div(group, tile), .tile = tile, .rows = group};
}

/* With so many CTAs, which take `heads` heads each. */
static cpa_cuda_decode_shares share(const cpa_attend_batch *batch, int64_t decode_rows, int64_t ctas, int64_t heads) {
    const cpa_cuda_team team = cpa_cuda_team_of(&batch->shape, batch->block_size);
    cpa_cuda_decode_shares shares = {.teams = cpa_max64(ctas / team.ctas, 1),
                                     .row_tiles = team.ctas > 1 && team.tile > CPA_CUDA_DECODE_ROWS ? 2 : 1};
    int64_t load = 0, pieces = 0;
    for (int pass = 0; pass < 2; pass++) { /* the load, from which the cap follows; then the pieces */
        for (int64_t i = 0; i < batch->n_items; i++) {
            const int64_t rows = cpa_cuda_packed_rows(batch, &batch->items[i]);
            const int64_t tiles = cpa_cuda_ceil_div(batch->items[i].k_count, CPA_CUDA_DECODE_KEYS);
            const int64_t units = cpa_cuda_decode_units(team, rows);
            if (rows == 0 || rows > decode_rows) continue;
            if (cpa_min64(rows, team.tile) > CPA_CUDA_DECODE_ROWS) shares.row_tiles = 2;
            if (pass == 0) {
                load += units * (tiles + CPA_CUDA_DECODE_OVERHEAD);
                continue;
            }
            const int64_t n = cpa_cuda_decode_pieces(tiles, shares.cap);
            if (cpa_cuda_ceil_div(tiles, n) > shares.longest) shares.longest = cpa_cuda_ceil_div(tiles, n);
            pieces += units * n;
        }
        shares.cap = cpa_cuda_decode_cap(load, shares.teams, heads);
    }
    shares.apart = pieces <= shares.teams;
    if (!shares.apart) shares.longest = shares.cap - CPA_CUDA_DECODE_OVERHEAD;
    return shares;
}

/* The most rows of a unit, and the most pieces of one. */
typedef struct unit_sizes {
    int64_t rows, pieces;
} unit_sizes;
static unit_sizes most_of_units(const cpa_attend_batch *batch, int64_t decode_rows,
                                const cpa_cuda_decode_shares *shares) {
    const cpa_cuda_team team = cpa_cuda_team_of(&batch->shape, batch->block_size);
    unit_sizes most = {0, 0};
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t rows = cpa_cuda_packed_rows(batch, &batch->items[i]);
        const int64_t tiles = cpa_cuda_ceil_div(batch->items[i].k_count, CPA_CUDA_DECODE_KEYS);
        if (rows == 0 || rows > decode_rows) continue;
        most.rows = cpa_max64(most.rows, cpa_min64(rows, team.rows));
        most.pieces = cpa_max64(most.pieces, cpa_cuda_decode_pieces(tiles, shares->cap));
    }
    return most;
}

/* Whether CTAs of whole tokens are done first: those of one head read longer, but a CTA that joins the states of a unit
 * has those of its head alone. */
static int tokens_pay(const cpa_attend_batch *batch, int64_t decode_rows, const cpa_cuda_decode_shares *of_heads,
                      const cpa_cuda_decode_shares *of_tokens) {
    const unit_sizes most = most_of_units(batch, decode_rows, of_tokens);
    const int64_t states = most.pieces > 1 ? most.pieces + 1 : 0; /* where units share a team, a cut more */
    const int64_t join = cpa_cuda_ceil_div(states * CPA_CUDA_TOKEN_STATE_COST, CPA_CUDA_DECODE_KEYS);
    return most.rows <= CPA_CUDA_TOKEN_ROWS && of_tokens->longest * CPA_CUDA_TOKEN_COST + join < of_heads->longest;
}

/* Wide CTAs, half as many, leave fewer states to join; they are taken where no multiprocessor has more keys then. Over
 * tokens that a CTA takes whole those are the wide ones, and of others there is one on a multiprocessor as well. */
cpa_cuda_decode_shares cpa_cuda_share_decode(const cpa_attend_batch *batch, int64_t decode_rows,
                                             int32_t multiprocessors, int wide_fits) {
    const cpa_cuda_attend_geometry geometry = cpa_cuda_decode_geometry(&batch->shape, batch->block_size);
    const int64_t places = (int64_t)multiprocessors * geometry.heads;
    const cpa_cuda_decode_shares shares =
        share(batch, decode_rows, geometry.ctas * places / batch->shape.kv_heads, geometry.heads);
    cpa_cuda_decode_shares wide = share(batch, decode_rows, places / batch->shape.kv_heads, geometry.heads);
    wide.wide = 1;
    if (wide_fits && cpa_cuda_takes_tokens(&batch->shape, batch->block_size)) {
        cpa_cuda_decode_shares tokens =
            share(batch, decode_rows, places * CPA_CUDA_TOKEN_HEADS / batch->shape.kv_heads, geometry.heads);
        tokens.wide = 1;
        return tokens_pay(batch, decode_rows, &shares, &tokens) ? tokens : shares;
    }
    if (!wide_fits || !geometry.wide || shares.row_tiles > 1 || !wide.apart) return shares;
    return wide.longest <= geometry.ctas * shares.longest ? wide : shares;
}

int64_t cpa_cuda_prefill_tiles(const cpa_attend_batch *batch, const cpa_attend_item *item, int32_t tile_rows) {
    const int64_t rows = cpa_cuda_packed_rows(batch, item);
    return rows <= cpa_cuda_most_decode_rows(&batch->shape, batch->block_size) ? 0 : cpa_cuda_ceil_div(rows, tile_rows);
}

int64_t cpa_cuda_prefill_pieces(const cpa_attend_batch *batch, int32_t tile_rows, int64_t split_keys) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t cuts = cpa_cuda_ceil_div(batch->items[i].k_count, split_keys);
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
