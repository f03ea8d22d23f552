#include "kernels/cuda/attend/attend_cascade.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_split.h"

/* Time of a multiprocessor, in eighths of what it takes to read CPA_CUDA_DECODE_KEYS keys and values of one head from
 * memory, while all others do so too: 0.95 us on an H200, heads of 128 in 16 bits. Fitted there to the cases of
 * docs/notebook/cascade.md. */
enum {
    FLAT_COST = 5,     /* such keys if they are shared, but read by each item: from the L2 cache, where they fit it; */
    CODE_COST = 3,     /* the same of a quantised cache, */
    RUN_COST = 8,      /* of rows in runs, */
    RUN_CODE_COST = 5, /* and of both */
    TILE_COST = 18,    /* a full tile of rows against CPA_CUDA_PREFILL_KEYS keys */
    WIDEN_CODES_COST = 24,       /* so many keys become elements; */
    WIDEN_RUNS_COST = 32,        /* the same of rows in runs */
    LATENT_FEW_ROWS = 16,        /* over latents: of an item, up to which the reading binds; more are in tiles */
    LATENT_FLAT_COST = 14,       /* FLAT_COST for an item of so few rows, */
    LATENT_CODE_COST = 10,       /* over codes of one scale, */
    LATENT_TILED_COST = 18,      /* and over those of CPA_FP8_T128; */
    LATENT_TILE_COST = 31,       /* TILE_COST, */
    LATENT_CODE_TILE_COST = 41,  /* over codes, */
    LATENT_TILED_TILE_COST = 55, /* and over those of CPA_FP8_T128 */
    LATENT_LAUNCH_COST = 400,    /* of a kernel more, whose CTAs take long to begin, and of joining more states */
    PIECE_COST = 32,             /* beginning and ending a piece of a node */
    LAUNCH_COST = 86,            /* of a kernel more, and of joining more states; */
    WIDEN_LAUNCH_COST = 34,      /* of one that widens */
    LEAST_PIECE_TILES = 4,       /* of CPA_CUDA_PREFILL_KEYS */
    MOST_WAVES = 3
};

static int64_t group_of(const cpa_attend_batch *batch) {
    return batch->shape.q_heads / batch->shape.kv_heads;
}

int64_t cpa_cuda_tokens_of_node(const cpa_cascade *tree, const cpa_attend_batch *batch, const cpa_cascade_node *node) {
    int64_t tokens = 0;
    for (int64_t i = node->first; i < node->first + node->count; i++)
        tokens += batch->items[tree->items[i].index].q_count;
    return tokens;
}

/* ---- what pays ---- */

typedef struct cascade_costs {
    const cpa_cascade *tree;
    const cpa_attend_batch *batch;
    int64_t token_entries, tile_entries; /* of the row list */
    int64_t tile;                        /* TILE_COST for these heads */
    int64_t flat;                        /* FLAT_COST for this dtype */
    int64_t widen;  /* cost to prepare CPA_CUDA_PREFILL_KEYS shared keys; 0: they are attended as they lie */
    int64_t launch; /* cost of all launches that sharing needs */
} cascade_costs;

static int64_t entries_of(const cascade_costs *c, const cpa_cascade_node *node) {
    return cpa_cuda_tokens_of_node(c->tree, c->batch, node) * c->token_entries;
}

static int64_t tiles_of(const cascade_costs *c, const cpa_cascade_node *node) {
    return cpa_cuda_ceil_div(entries_of(c, node), c->tile_entries);
}

/* Half as much is read of narrow heads, while a tile takes the same time: its rows are more, and exponentials bind. */
static int64_t tile_cost(const cpa_attend_batch *batch) {
    return TILE_COST * (cpa_cuda_width_of(batch->shape.k_dim, batch->shape.v_dim) == CPA_CUDA_64 ? 2 : 1);
}

static cascade_costs costs_of(const cpa_cascade *tree, const cpa_attend_batch *batch, int32_t tile_rows) {
    const int codes = cpa_dtype_is_quantised(batch->shape.kv_dtype), runs = batch->shape.layout == CPA_VLLM_X;
    cascade_costs costs = {.tree = tree,
                           .batch = batch,
                           .token_entries = cpa_cuda_token_entries(batch, tile_rows),
                           .tile_entries = cpa_cuda_tile_entries(batch, tile_rows)};
    if (batch->shape.v_in_k) {
        const int tiled = batch->shape.kv_dtype == CPA_FP8_T128;
        costs.tile = tiled ? LATENT_TILED_TILE_COST : codes ? LATENT_CODE_TILE_COST : LATENT_TILE_COST;
        costs.flat = tiled ? LATENT_TILED_COST : codes ? LATENT_CODE_COST : LATENT_FLAT_COST;
        costs.launch = LATENT_LAUNCH_COST;
        return costs;
    }
    costs.tile = tile_cost(batch);
    costs.flat = runs ? (codes ? RUN_CODE_COST : RUN_COST) : (codes ? CODE_COST : FLAT_COST);
    costs.widen = codes ? WIDEN_CODES_COST : runs ? WIDEN_RUNS_COST : 0;
    costs.launch = LAUNCH_COST + (codes || runs ? WIDEN_LAUNCH_COST : 0);
    return costs;
}

static int64_t key_tiles_of(const cpa_cascade_node *node) {
    return (node->k_end - node->k_begin) / CPA_CUDA_PREFILL_KEYS;
}

/* What decode pieces take for CPA_CUDA_DECODE_KEYS keys of an item. */
static int64_t flat_cost_of(const cascade_costs *c, const cpa_attend_item *item) {
    const int64_t rows = cpa_cuda_packed_rows(c->batch, item);
    if (!c->batch->shape.v_in_k || rows <= LATENT_FEW_ROWS) return c->flat;
    return cpa_cuda_ceil_div(rows, CPA_CUDA_WIDE_ROWS) * c->tile * CPA_CUDA_DECODE_KEYS / CPA_CUDA_PREFILL_KEYS;
}

/* The same for the keys of a node if nobody shares them, for a KV head. */
static int64_t flat_cost(const cascade_costs *c, const cpa_cascade_node *node) {
    int64_t cost = 0;
    for (int64_t i = node->first; i < node->first + node->count; i++)
        cost += flat_cost_of(c, &c->batch->items[c->tree->items[i].index]);
    return (node->k_end - node->k_begin) / CPA_CUDA_DECODE_KEYS * cost;
}

static int pays(const void *ctx, const cpa_cascade_node *node) {
    const cascade_costs *c = ctx;
    const int64_t key_tiles = key_tiles_of(node);
    return flat_cost(c, node) > tiles_of(c, node) * (key_tiles * c->tile + PIECE_COST) + key_tiles * c->widen;
}

static int always_pays(const void *ctx, const cpa_cascade_node *node) {
    (void)ctx, (void)node;
    return 1;
}

/* ---- where keys are cut ---- */

static int64_t pieces_at(const cascade_costs *c, int64_t split_keys) {
    int64_t pieces = 0;
    for (int64_t n = 0; n < c->tree->n_nodes; n++) {
        const cpa_cascade_node *node = &c->tree->nodes[n];
        pieces += tiles_of(c, node) * cpa_cuda_ceil_div(node->k_end - node->k_begin, split_keys);
    }
    return pieces;
}

/* The shortest cut that makes at most so many pieces, or the longest that cuts anything. */
static int64_t least_split(const cascade_costs *c, int64_t most_keys, int64_t most_pieces) {
    int64_t least = LEAST_PIECE_TILES, most = cpa_cuda_ceil_div(most_keys, CPA_CUDA_PREFILL_KEYS);
    while (least < most) {
        const int64_t middle = least + (most - least) / 2;
        if (pieces_at(c, middle * CPA_CUDA_PREFILL_KEYS) <= most_pieces) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    return least * CPA_CUDA_PREFILL_KEYS;
}

/* The cut of all nodes that ends first, into full waves of pieces; *time is what it takes. */
static cpa_cuda_cascade_cut cut_nodes(const cascade_costs *c, int32_t multiprocessors, int64_t *time) {
    const int64_t heads = c->batch->shape.kv_heads;
    cpa_cuda_cascade_cut best = {0};
    int64_t most_keys = 0;
    *time = INT64_MAX;
    for (int64_t n = 0; n < c->tree->n_nodes; n++)
        most_keys = cpa_max64(most_keys, c->tree->nodes[n].k_end - c->tree->nodes[n].k_begin);
    for (int64_t waves = 1; waves <= MOST_WAVES; waves++) {
        cpa_cuda_cascade_cut cut = {.split_keys = least_split(c, most_keys, waves * multiprocessors / heads)};
        cut.pieces = pieces_at(c, cut.split_keys);
        const int64_t longest = cpa_min64(cut.split_keys, most_keys) / CPA_CUDA_PREFILL_KEYS * c->tile + PIECE_COST;
        const int64_t takes = cpa_cuda_ceil_div(cut.pieces * heads, multiprocessors) * longest;
        if (takes >= *time) continue;
        *time = takes;
        best = cut;
    }
    for (int64_t n = 0; n < c->tree->n_nodes; n++) best.rows += entries_of(c, &c->tree->nodes[n]);
    return best;
}

cpa_cuda_cascade_cut cpa_cuda_choose_cascade(cpa_cascade *tree, const cpa_attend_batch *batch, int32_t tile_rows,
                                             int32_t multiprocessors, int always) {
    const cascade_costs costs = costs_of(tree, batch, tile_rows);
    int64_t flat = 0, widen = 0, time;
    cpa_cascade_keep(tree, always ? always_pays : pays, &costs);
    if (tree->n_nodes == 0) return (cpa_cuda_cascade_cut){0};
    const cpa_cuda_cascade_cut cut = cut_nodes(&costs, multiprocessors, &time);
    for (int64_t n = 0; n < tree->n_nodes; n++) {
        flat += flat_cost(&costs, &tree->nodes[n]);
        widen += key_tiles_of(&tree->nodes[n]) * costs.widen;
    }
    const int64_t heads = batch->shape.kv_heads;
    if (always || (time + costs.launch) * multiprocessors + widen * heads < flat * heads) return cut;
    tree->n_nodes = 0;
    return (cpa_cuda_cascade_cut){0};
}

/* ---- pieces and rows ---- */

static cpa_status reserve(void *array, int64_t *capacity, int64_t n, size_t size, cpa_error *err) {
    if (cpa_array_reserve(array, capacity, n, size)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld shared rows", (long long)n);
}

/* What is left of each item, and how many states of shared keys it has. */
static cpa_status part_items(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, const cpa_cuda_cascade_cut *cut,
                             cpa_error *err) {
    const cpa_cascade *tree = &cascade->tree;
    CPA_TRY(reserve(&cascade->own, &cascade->own_capacity, batch->n_items, sizeof *cascade->own, err));
    CPA_TRY(reserve(&cascade->items, &cascade->items_capacity, batch->n_items, sizeof *cascade->items, err));
    CPA_TRY(reserve(&cascade->first_states, &cascade->first_states_capacity, tree->n_nodes,
                    sizeof *cascade->first_states, err));
    for (int64_t i = 0; i < batch->n_items; i++) {
        cascade->own[i] = batch->items[i];
        cascade->items[i] = (cpa_cuda_cascade_item){0};
    }
    for (int64_t n = 0; n < tree->n_nodes; n++) {
        const cpa_cascade_node *node = &tree->nodes[n];
        const int64_t keys = node->k_end - node->k_begin;
        cascade->first_states[n] = cascade->items[tree->items[node->first].index].states;
        for (int64_t i = node->first; i < node->first + node->count; i++) {
            cpa_attend_item *own = &cascade->own[tree->items[i].index];
            own->k_first += keys;
            own->k_count -= keys;
            own->table += keys / batch->block_size;
            cascade->items[tree->items[i].index].states += (int32_t)cpa_cuda_ceil_div(keys, cut->split_keys);
        }
    }
    return CPA_OK;
}

/* Most tokens of an item that shares: those of a unit of decode, whose states lie together. */
static int64_t most_tokens(const cpa_attend_batch *batch) {
    const int64_t rows =
        batch->shape.v_in_k ? cpa_cuda_team_of(&batch->shape, batch->block_size).rows : CPA_CUDA_DECODE_ROWS;
    return rows / group_of(batch);
}

cpa_status cpa_cuda_cascade_plan(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables,
                                 int32_t tile_rows, int32_t multiprocessors, cpa_cuda_cascade_cut *cut,
                                 cpa_error *err) {
    const int64_t unit = cpa_max64(CPA_CUDA_PREFILL_KEYS, batch->block_size);
    const int always = batch->cascade_attention == CPA_CASCADE_ALWAYS;
    *cut = (cpa_cuda_cascade_cut){0};
    CPA_TRY(cpa_cascade_find(&cascade->tree, batch, tables, unit, most_tokens(batch), err));
    if (cascade->tree.n_nodes == 0) return CPA_OK;
    *cut = cpa_cuda_choose_cascade(&cascade->tree, batch, tile_rows, multiprocessors, always);
    return cut->split_keys > 0 ? part_items(cascade, batch, cut, err) : CPA_OK;
}

/* A tile of a node's rows, `entries` of those listed from `first` on, against the keys [k_begin, k_end) of the node. */
static cpa_cuda_piece piece_of(const cpa_attend_batch *batch, const cpa_attend_item *item, const cpa_cascade_node *node,
                               int64_t first, int64_t entries, int64_t k_begin, int64_t k_end) {
    return (cpa_cuda_piece){.q_row = first,
                            .k_first = item->k_first + node->k_begin,
                            .table = item->table + node->k_begin / batch->block_size,
                            .row_end = (int32_t)(entries * group_of(batch)),
                            .k_begin = (int32_t)k_begin,
                            .k_end = (int32_t)k_end,
                            .q_set = item->q_set,
                            .k_set = item->k_set,
                            .next = -1};
}

/* Of a token's rows those of one tile, where they are several. */
static void take_tile(cpa_cuda_piece *piece, int64_t entry, int64_t token_entries, int32_t tile_rows, int64_t group) {
    if (token_entries == 1) return;
    piece->row_begin = (int32_t)(entry % token_entries * tile_rows);
    piece->row_end = (int32_t)cpa_min64(piece->row_begin + tile_rows, group);
}

/* The entry of a tile of a token's rows. Tiles before it are full, and their states lie before its own; rows count from
 * the token's first. */
static cpa_cuda_listed_row listed_row(const cpa_cuda_cascade_item *shared, const cpa_attend_item *item,
                                      const cpa_cascade_row *row, int64_t tile, int32_t tile_rows, int64_t group) {
    const int64_t before = tile * tile_rows, rows = cpa_min64(group - before, tile_rows);
    const int64_t states_before = before * shared->all_states - before;
    return (cpa_cuda_listed_row){
        .position = row->position,
        .row = item->q_row + row->token,
        .partial = (int32_t)(shared->first_partial + (tile > 0 ? states_before : row->token * group)),
        .stride = (int32_t)(group > tile_rows ? rows : item->q_count * group),
    };
}

static cpa_status list_rows(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, const cpa_cascade_node *node,
                            int32_t tile_rows, int64_t first_ready, cpa_cuda_listed_row *rows, int64_t *n,
                            cpa_error *err) {
    const int64_t token_entries = cpa_cuda_token_entries(batch, tile_rows);
    int64_t tokens;
    CPA_TRY(cpa_cascade_list_rows(&cascade->tree, batch, node, &tokens, err));
    *n = tokens * token_entries;
    for (int64_t i = 0; i < *n; i++) {
        const cpa_cascade_row *row = &cascade->tree.rows[i / token_entries];
        rows[i] = listed_row(&cascade->items[row->item], &batch->items[row->item], row, i % token_entries, tile_rows,
                             group_of(batch));
        rows[i].ready = row->item >= first_ready;
    }
    return CPA_OK;
}

/* Tiles of a node that read the same keys stand side by side: they run at once, and the L2 cache has them. */
cpa_status cpa_cuda_cascade_write(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, int32_t tile_rows,
                                  const cpa_cuda_cascade_cut *cut, int64_t first_ready, cpa_cuda_piece *pieces,
                                  cpa_cuda_listed_row *rows, cpa_error *err) {
    const cpa_cascade *tree = &cascade->tree;
    const int64_t tile_entries = cpa_cuda_tile_entries(batch, tile_rows),
                  token_entries = cpa_cuda_token_entries(batch, tile_rows);
    int64_t first = 0, n = 0;
    for (int64_t i = 0; i < tree->n_nodes; i++) {
        const cpa_cascade_node *node = &tree->nodes[i];
        const cpa_attend_item *item = &batch->items[tree->items[node->first].index];
        const int64_t keys = node->k_end - node->k_begin;
        int64_t entries, state = cascade->first_states[i];
        CPA_TRY(list_rows(cascade, batch, node, tile_rows, first_ready, rows + first, &entries, err));
        for (int64_t key = 0; key < keys; key += cut->split_keys, state++) {
            for (int64_t entry = 0; entry < entries; entry += tile_entries) {
                pieces[n] = piece_of(batch, item, node, first + entry, cpa_min64(tile_entries, entries - entry), key,
                                     cpa_min64(key + cut->split_keys, keys));
                take_tile(&pieces[n], entry, token_entries, tile_rows, group_of(batch));
                pieces[n++].partial = (int32_t)state;
            }
        }
        first += entries;
    }
    return CPA_OK;
}

void cpa_cuda_cascade_destroy(cpa_cuda_cascade *cascade) {
    if (!cascade) return;
    cpa_cascade_release(&cascade->tree);
    free(cascade->own);
    free(cascade->items);
    free(cascade->first_states);
    free(cascade);
}
