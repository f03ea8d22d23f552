/* The CUDA attend plan: rows become tiles, keys are split until every multiprocessor has work, and everything that the
 * kernels read about a step goes to the device in one copy.
 *
 * Decode: units whose pieces are no more than the CTAs that run at once are cut evenly, a piece a CTA. Otherwise the
 * keys of all units lie in a row, cut into as many equal stretches as there are CTAs; a unit that a cut crosses leaves
 * a partial state on each side. Units that are ready go to the first CTAs, which find room beside the kernel that the
 * others wait for. Prefill: one CTA a tile, the longest first, cut only where there are too few tiles to fill the
 * device, or where those that come last would leave most of it idle. All but the last run for one KV head after the
 * other: CTAs that run at once then read the same keys, which stay in the L2 cache. Keys that decode items share go to
 * pieces of their own, of the prefill kernels (attend_cascade.c). */
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_cascade.h"
#include "kernels/cuda/attend/attend_split.h"

enum {
    LEAST_STEADY_ENTRIES = 256, /* table entries that a padded plan has room for; then powers of two */
    PREFILL_WAVES = 3,          /* tiles are cut when they fill the device fewer times than this */
    PREFILL_OVERHEAD = 2,       /* cost of beginning and ending a prefill piece, in units of CPA_CUDA_PREFILL_KEYS */
    LEAST_PREFILL_SPLIT = 1024, /* keys */
    MOST_TAIL_CUTS = 8,         /* of one of the last tiles */
    TAIL_WAVES = 2,             /* the last tiles run for all KV heads at once, so that they are the shortest of all */
    STEADY_SHARED = 8,          /* pieces over shared keys of a padded plan come in multiples of so many, */
    STEADY_WIDENED = 256        /* and their widened blocks */
};

typedef struct plan_builder {
    const cpa_attend_batch *given;
    cpa_attend_batch own; /* the same, where items share keys with those alone that are their own */
    const cpa_attend_batch *batch;
    cpa_cuda_cascade *cascade;
    cpa_cuda_cascade_cut cut; /* of shared keys */
    int64_t n_shared;         /* pieces over them, and those that fill a padded plan up */
    int64_t n_listed;         /* rows of theirs */
    const int64_t *state_shifts;
    int32_t group;
    int32_t multiprocessors;
    int wide_fits;              /* CTAs of decode */
    int32_t tile_rows;          /* of prefill */
    int64_t padded_items;       /* the most decode units of a plan whose launches stay the same; 0: of this one */
    int64_t unit_rows;          /* and the most packed rows of one of them */
    int64_t n_decode;           /* units */
    int64_t n_tiles, tile_keys; /* prefill tiles, and the keys of all of them, in CPA_CUDA_PREFILL_KEYS */
    int64_t most_keys;          /* of one tile, in the same unit */
    int64_t split_keys;         /* prefill tiles are cut into pieces of so many */
    int64_t n_pieces;           /* prefill */
    int64_t by_head;            /* as in the plan */
    int64_t tail_pieces;        /* prefill; room for so many more */
    int64_t visible_keys;       /* of all prefill pieces */
    cpa_cuda_decode_shares shares;
    int64_t first_ready; /* item; the last ones are ready */
    int full, masked;    /* as in the fusion */
    cpa_cuda_piece *decode;
    cpa_cuda_piece *prefill;
    cpa_cuda_costed_piece *in_order;
    cpa_cuda_split *splits; /* prefill */
    int64_t n_splits;
    int64_t n_decode_splits;
    int64_t partial_rows;
    int64_t
        n_widened; /* places of blocks of prefill items, and shared ones, if the kernels over those take no others */
} plan_builder;

static int64_t state_shift(const plan_builder *b, const cpa_attend_item *item) {
    return b->state_shifts ? b->state_shifts[item - b->batch->items] : 0;
}

static int is_decode(const plan_builder *b, const cpa_attend_item *item) {
    return cpa_cuda_packed_rows(b->batch, item) <= CPA_CUDA_DECODE_ROWS;
}

static int is_ready(const plan_builder *b, const cpa_attend_item *item) {
    return item - b->batch->items >= b->first_ready;
}

/* Table entries of an item. */
static int64_t entries_of(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return cpa_cuda_ceil_div(item->k_count, batch->block_size);
}

/* Whether prefill kernels may need blocks widened: where the cache is quantised, or its rows lie in runs. */
static int may_widen(const cpa_attend_batch *batch) {
    return cpa_dtype_is_quantised(batch->shape.kv_dtype) || batch->shape.layout == CPA_VLLM_X;
}

static int64_t wide_places(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return cpa_cuda_wide_places(batch->block_size, entries_of(batch, item));
}

/* How many units, tiles and keys there are. */
static cpa_status count_work(plan_builder *b, cpa_error *err) {
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        int64_t rows = cpa_cuda_packed_rows(b->batch, item);
        if (rows > INT32_MAX / 2 || item->k_count > INT32_MAX / 2)
            return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: items[%lld] has %lld rows and %lld keys, at most %d",
                            (long long)i, (long long)rows, (long long)item->k_count, INT32_MAX / 2);
        if (rows == 0) continue;
        if (is_decode(b, item)) {
            b->n_decode++;
        } else {
            int64_t tiles = cpa_cuda_prefill_tiles(b->batch, item, b->tile_rows),
                    keys = cpa_cuda_ceil_div(item->k_count, CPA_CUDA_PREFILL_KEYS);
            b->n_tiles += tiles;
            b->tile_keys += tiles * keys;
            if (may_widen(b->batch)) b->n_widened += wide_places(b->batch, item);
            if (keys > b->most_keys) b->most_keys = keys;
        }
    }
    return CPA_OK;
}

/* Where the tiles fill the device a few times at most, the cut that makes `waves` full waves of pieces of about the
 * same length, for the number of waves that is done first. */
static void choose_prefill_split(plan_builder *b) {
    const int64_t heads = b->batch->shape.kv_heads, device = b->multiprocessors;
    int64_t least = INT64_MAX;
    b->split_keys = INT32_MAX;
    if (b->n_tiles == 0 || b->n_tiles * heads >= PREFILL_WAVES * device) return;
    for (int64_t waves = 1; waves <= PREFILL_WAVES; waves++) {
        int64_t tiles = cpa_cuda_ceil_div(b->tile_keys * heads, waves * device), slots = waves * device;
        if (tiles < LEAST_PREFILL_SPLIT / CPA_CUDA_PREFILL_KEYS) tiles = LEAST_PREFILL_SPLIT / CPA_CUDA_PREFILL_KEYS;
        tiles = cpa_cuda_least_split(b->batch, b->tile_rows, tiles, b->most_keys, slots / heads);
        const int64_t pieces = cpa_cuda_prefill_pieces(b->batch, b->tile_rows, tiles * CPA_CUDA_PREFILL_KEYS);
        const int64_t used = cpa_cuda_ceil_div(pieces * heads, device);
        const int64_t cost = used * (tiles + PREFILL_OVERHEAD);
        if (cost < least) {
            least = cost;
            b->split_keys = tiles * CPA_CUDA_PREFILL_KEYS;
        }
    }
}

static void choose_splits(plan_builder *b) {
    b->shares = cpa_cuda_share_decode(b->batch, b->multiprocessors, b->wide_fits);
    choose_prefill_split(b);
    b->n_pieces = cpa_cuda_prefill_pieces(b->batch, b->tile_rows, b->split_keys);
    if (b->split_keys == INT32_MAX)
        b->tail_pieces = (MOST_TAIL_CUTS - 1) * (b->n_pieces < b->multiprocessors ? b->n_pieces : b->multiprocessors);
}

/* A tile of the item's rows against all its keys. */
static cpa_cuda_piece whole_tile(const plan_builder *b, const cpa_attend_item *item, int64_t row_begin,
                                 int64_t row_end) {
    return (cpa_cuda_piece){.q_row = item->q_row,
                            .state_shift = state_shift(b, item),
                            .q_first = item->q_first,
                            .k_first = item->k_first,
                            .table = item->table,
                            .row_begin = (int32_t)row_begin,
                            .row_end = (int32_t)row_end,
                            .k_begin = 0,
                            .k_end = (int32_t)item->k_count,
                            .q_set = item->q_set,
                            .k_set = item->k_set,
                            .partial = -1,
                            .next = -1,
                            .ready = is_decode(b, item) && is_ready(b, item)};
}

/* Notes that the rows of a tile come from `count` pieces, whose states follow each other in the work space. */
static void add_split(plan_builder *b, const cpa_cuda_piece *tile, int64_t count) {
    b->splits[b->n_splits++] = (cpa_cuda_split){.q_row = tile->q_row,
                                                .state_shift = tile->state_shift,
                                                .row_begin = tile->row_begin,
                                                .row_end = tile->row_end,
                                                .partial = (int32_t)b->partial_rows,
                                                .count = (int32_t)count};
    b->partial_rows += count * (tile->row_end - tile->row_begin);
}

/* Hands decode pieces to CTAs: the first of each at its own index, the others after those, linked. */
typedef struct decode_deal {
    cpa_cuda_piece *last; /* of the current CTA; NULL: it has none yet */
    cpa_cuda_decode_turn turn;
    int64_t extra; /* index of the next piece that is not the first of a CTA */
} decode_deal;

/* The next piece, of `take` tiles of the unit. */
static cpa_cuda_piece *deal_piece(plan_builder *b, decode_deal *deal, cpa_cuda_decode_unit *unit, int64_t *take) {
    const int64_t cta = deal->turn.cta;
    *take = cpa_cuda_deal_piece(&b->shares, &deal->turn, unit);
    if (deal->turn.cta != cta) deal->last = NULL;
    const int64_t at = deal->last ? deal->extra++ : deal->turn.cta;
    if (deal->last) deal->last->next = (int32_t)at;
    return deal->last = &b->decode[at];
}

/* The pieces of a tile learn of each other: `first`, and those that CTAs after its own begin with. */
static void join_decode(plan_builder *b, cpa_cuda_piece *first, int64_t cta, int64_t pieces, int64_t shared) {
    const int32_t rows = first->row_end - first->row_begin;
    for (int64_t i = 0; i < pieces; i++) {
        cpa_cuda_piece *piece = i == 0 ? first : &b->decode[cta + i];
        piece->partial = (int32_t)(b->partial_rows + (shared + i) * rows);
        piece->pieces = (int32_t)pieces;
        piece->states = (int32_t)(shared + pieces);
        piece->first_partial = (int32_t)b->partial_rows;
        piece->counter = (int32_t)b->n_decode_splits;
    }
    b->n_decode_splits++;
    b->partial_rows += (shared + pieces) * rows;
}

/* States of shared keys that the rows of an item begin with, and what is to lie where the others will. */
static int64_t shared_states(const plan_builder *b, const cpa_attend_item *item) {
    if (b->cut.split_keys == 0) return 0;
    cpa_cuda_cascade_item *shared = &b->cascade->items[item - b->batch->items];
    shared->first_partial = (int32_t)b->partial_rows;
    return shared->states;
}

/* Those that are ready come first. */
static void split_decode(plan_builder *b) {
    decode_deal deal = {.extra = b->shares.ctas};
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[(b->first_ready + i) % b->batch->n_items];
        const int64_t rows = cpa_cuda_packed_rows(b->batch, item),
                      tiles = cpa_cuda_ceil_div(item->k_count, CPA_CUDA_DECODE_KEYS);
        cpa_cuda_decode_unit unit = cpa_cuda_decode_unit_of(&b->shares, tiles);
        int64_t done = 0, pieces = 0, first_cta = 0, take;
        cpa_cuda_piece *first = NULL;
        if (rows == 0 || !is_decode(b, item)) continue;
        do {
            cpa_cuda_piece *piece = deal_piece(b, &deal, &unit, &take);
            *piece = whole_tile(b, item, 0, rows);
            piece->k_begin = (int32_t)(done * CPA_CUDA_DECODE_KEYS);
            if (unit.left > 0) piece->k_end = (int32_t)((done + take) * CPA_CUDA_DECODE_KEYS);
            if (pieces == 0) first = piece, first_cta = deal.turn.cta;
            done += take;
            pieces++;
        } while (done < tiles);
        const int64_t shared = shared_states(b, item);
        if (pieces > 1 || shared > 0) join_decode(b, first, first_cta, pieces, shared);
    }
    b->shares.ctas = b->n_decode > 0 ? deal.turn.cta + 1 : 0;
}

/* Keys of the piece that a causal query sees at most, or all: how long it will take. */
static int64_t visible_keys(const plan_builder *b, const cpa_cuda_piece *piece) {
    cpa_owner_map map = b->batch->map;
    int64_t last = cpa_token_position(map, piece->q_set, piece->q_first + (piece->row_end - 1) / b->group);
    int64_t end = cpa_tokens_before(map, piece->k_set, last + 1) - piece->k_first;
    if (end > piece->k_end || b->full) end = piece->k_end;
    return end > piece->k_begin ? end - piece->k_begin : 0;
}

/* The pieces of prefill tiles in the order of rows and keys, with what they cost. */
static void split_prefill(plan_builder *b) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        int64_t rows = cpa_cuda_packed_rows(b->batch, item), cuts = cpa_cuda_ceil_div(item->k_count, b->split_keys);
        if (rows == 0 || is_decode(b, item)) continue;
        for (int64_t row = 0; row < rows; row += b->tile_rows) {
            int64_t row_end = row + b->tile_rows < rows ? row + b->tile_rows : rows;
            cpa_cuda_piece tile = whole_tile(b, item, row, row_end);
            const int64_t partial = b->partial_rows;
            if (cuts > 1) add_split(b, &tile, cuts);
            for (int64_t cut = 0; cut == 0 || cut < cuts; cut++, n++) {
                cpa_cuda_piece *piece = &b->in_order[n].piece;
                *piece = tile;
                piece->k_begin = (int32_t)(cut * b->split_keys);
                if (cut + 1 < cuts) piece->k_end = (int32_t)((cut + 1) * b->split_keys);
                if (cuts > 1) piece->partial = (int32_t)(partial + cut * (row_end - row));
                b->in_order[n].cost = visible_keys(b, piece);
                b->visible_keys += b->in_order[n].cost;
            }
        }
    }
}

/* Counting sort by cost, the longest first; what costs about the same keeps its order, so that tiles that read the same
 * keys stay together. */
static void sort_prefill(plan_builder *b) {
    enum { BUCKETS = 1024 };
    int64_t begin[BUCKETS + 1] = {0}, most = 1;
    for (int64_t i = 0; i < b->n_pieces; i++) {
        if (b->in_order[i].cost > most) most = b->in_order[i].cost;
    }
    for (int64_t i = 0; i < b->n_pieces; i++) begin[(most - b->in_order[i].cost) * (BUCKETS - 1) / most + 1]++;
    for (int64_t i = 0; i < BUCKETS; i++) begin[i + 1] += begin[i];
    for (int64_t i = 0; i < b->n_pieces; i++)
        b->prefill[begin[(most - b->in_order[i].cost) * (BUCKETS - 1) / most]++] = b->in_order[i].piece;
}

/* Into how many pieces a tile of `cost` keys is cut when `left` keys remain, its own included (guided self-scheduling,
 * Polychronopoulos and Kuck, 1987): none shall take longer than what a multiprocessor still has to do. */
static int64_t tail_cuts(const plan_builder *b, int64_t cost, int64_t left) {
    const int64_t share = left * b->batch->shape.kv_heads / b->multiprocessors;
    const int64_t most = cost / LEAST_PREFILL_SPLIT < MOST_TAIL_CUTS ? cost / LEAST_PREFILL_SPLIT : MOST_TAIL_CUTS;
    const int64_t cuts = share > 0 ? (cost + share / 2) / share : most;
    return cuts < most ? cuts : most;
}

/* Pieces of whole tiles of keys that share what the tile's rows see, `cost` keys. */
static void cut_tile(plan_builder *b, const cpa_cuda_piece *tile, int64_t cost, int64_t cuts) {
    const int64_t partial = b->partial_rows, rows = tile->row_end - tile->row_begin;
    const int64_t keys =
        cpa_cuda_ceil_div(cpa_cuda_ceil_div(cost, cuts), CPA_CUDA_PREFILL_KEYS) * CPA_CUDA_PREFILL_KEYS;
    add_split(b, tile, cuts);
    for (int64_t cut = 0; cut < cuts; cut++) {
        cpa_cuda_piece *piece = &b->prefill[b->n_pieces++];
        *piece = *tile;
        piece->k_begin = (int32_t)(cut * keys);
        if (cut + 1 < cuts) piece->k_end = (int32_t)((cut + 1) * keys);
        piece->partial = (int32_t)(partial + cut * rows);
    }
}

/* All but the last tiles go head by head, if they fill the device often enough. */
static void choose_order(plan_builder *b) {
    if (b->split_keys < INT32_MAX) return;
    const int64_t tail = cpa_cuda_ceil_div(TAIL_WAVES * b->multiprocessors, b->batch->shape.kv_heads);
    b->by_head = b->n_pieces > tail ? b->n_pieces - tail : 0;
}

/* Cuts the last of the sorted tiles, as long as there is room. */
static void cut_tail(plan_builder *b) {
    const int64_t n = b->n_pieces;
    int64_t left = b->visible_keys, whole = 0;
    for (; whole < n; whole++) {
        const int64_t cost = visible_keys(b, &b->prefill[whole]);
        if (tail_cuts(b, cost, left) > 1) break;
        left -= cost;
    }
    for (int64_t i = whole; i < n; i++)
        b->in_order[i] = (cpa_cuda_costed_piece){b->prefill[i], visible_keys(b, &b->prefill[i])};
    b->n_pieces = whole;
    if (b->by_head > whole) b->by_head = whole;
    for (int64_t i = whole; i < n; i++) {
        const cpa_cuda_piece *tile = &b->in_order[i].piece;
        const int64_t cost = b->in_order[i].cost, cuts = tail_cuts(b, cost, left);
        left -= cost;
        if (cuts > 1 && cuts <= b->tail_pieces) {
            b->tail_pieces -= cuts - 1;
            cut_tile(b, tile, cost, cuts);
        } else {
            b->prefill[b->n_pieces++] = *tile;
        }
    }
}

/* The most splits of decode units: a cut lies between two CTAs, or before the unit's own keys. */
static int64_t most_decode_splits(const plan_builder *b, int64_t units) {
    return units < b->shares.ctas || b->cut.split_keys > 0 ? units : b->shares.ctas;
}

/* The sections of block tables. */
static void place_tables(cpa_cuda_plan *plan, const plan_builder *b, int64_t entries, int64_t *end) {
    const int64_t widened = b->n_widened > 0 ? entries : 0;
    plan->tables_at = cpa_cuda_place_section(end, entries * (int64_t)sizeof(int32_t));
    plan->widened_tables_at = cpa_cuda_place_section(end, widened * (int64_t)sizeof(int32_t));
    plan->widened_blocks_at = cpa_cuda_place_section(end, b->n_widened * (int64_t)sizeof(int32_t));
}

/* Places the sections of the image, those that are filled on the device last, each large enough for what the splits may
 * come to. */
static void place_sections(cpa_cuda_plan *plan, const plan_builder *b) {
    int64_t end = 0, items = b->batch->n_items, units = b->n_decode, entries = b->batch->n_table_entries;
    if (b->padded_items) {
        items = units = b->padded_items;
        int64_t room = LEAST_STEADY_ENTRIES;
        while (room < entries) room *= 2;
        entries = room;
    }
    plan->items_at = cpa_cuda_place_section(&end, items * (int64_t)sizeof(cpa_cuda_item));
    if (!plan->device_tables) place_tables(plan, b, entries, &end);
    plan->decode_at = cpa_cuda_place_section(&end, (units + b->shares.ctas) * (int64_t)sizeof(cpa_cuda_piece));
    plan->counters_at = cpa_cuda_place_section(
        &end, most_decode_splits(b, units) * b->batch->shape.kv_heads * (int64_t)sizeof(uint32_t));
    plan->prefill_at = cpa_cuda_place_section(&end, (b->n_pieces + b->tail_pieces) * (int64_t)sizeof(cpa_cuda_piece));
    plan->splits_at = cpa_cuda_place_section(&end, b->n_tiles * (int64_t)sizeof(cpa_cuda_split));
    plan->shared_at = cpa_cuda_place_section(&end, b->n_shared * (int64_t)sizeof(cpa_cuda_piece));
    plan->rows_at = cpa_cuda_place_section(&end, b->n_listed * (int64_t)sizeof(cpa_cuda_listed_row));
    plan->sources_at =
        cpa_cuda_place_section(&end, plan->device_tables ? items * (int64_t)sizeof(cpa_cuda_table_source) : 0);
    plan->upload_bytes = end;
    if (plan->device_tables) place_tables(plan, b, entries, &end);
    plan->image_bytes = end;
}

/* Gives the blocks of an item the places from `place` on. */
static void place_blocks(const plan_builder *b, const cpa_attend_item *item, int32_t place, int32_t *tables,
                         int32_t *blocks) {
    const int64_t entries = entries_of(b->batch, item), places = wide_places(b->batch, item);
    const int32_t ratio = cpa_cuda_wide_block(b->batch->block_size) / b->batch->block_size;
    for (int64_t i = 0; i < places; i++) blocks[place + i] = i < entries ? b->batch->block_tables[item->table + i] : -1;
    for (int64_t i = 0; i < places / ratio; i++) tables[item->table + i] = place / ratio + (int32_t)i;
}

/* The keys of a node, as its first item's tables have them. */
static cpa_attend_item keys_of_node(const plan_builder *b, const cpa_cascade_node *node) {
    cpa_attend_item keys = b->given->items[b->cascade->tree.items[node->first].index];
    keys.table += node->k_begin / b->given->block_size;
    keys.k_count = node->k_end - node->k_begin;
    return keys;
}

/* Gives each block of the prefill items, and of shared keys, a place; what lies on the device is placed there. */
static void place_widened(const plan_builder *b, int32_t *tables, int32_t *blocks, cpa_cuda_table_source *sources) {
    int32_t place = 0;
    if (b->n_widened == 0) return;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        if (cpa_cuda_packed_rows(b->batch, item) == 0 || is_decode(b, item)) continue;
        if (sources) {
            sources[i].place = place;
        } else {
            place_blocks(b, item, place, tables, blocks);
        }
        place += (int32_t)wide_places(b->batch, item);
    }
    if (sources) return; /* tables of the device share nothing */
    for (int64_t i = 0; i < b->cascade->tree.n_nodes && b->n_shared > 0; i++) {
        const cpa_attend_item keys = keys_of_node(b, &b->cascade->tree.nodes[i]);
        place_blocks(b, &keys, place, tables, blocks);
        place += (int32_t)wide_places(b->batch, &keys);
    }
    while (place < b->n_widened) blocks[place++] = -1;
}

/* Whether items get tables of their own: those that lie on the device have to, and so do small blocks that are widened
 * together, since their places depend on where an item begins and ends. */
static int packs_tables(const cpa_attend_batch *batch) {
    return batch->block_tables_on_device || (cpa_dtype_is_quantised(batch->shape.kv_dtype) &&
                                             cpa_cuda_wide_block(batch->block_size) > batch->block_size);
}

/* Items whose tables lie one behind the other; those of the host are copied. Notes the most entries of an item. */
static cpa_status pack_items(cpa_cuda_plan_memory *memory, const cpa_attend_batch *batch, cpa_attend_batch *packed,
                             int64_t *most_entries, cpa_error *err) {
    int64_t n = 0;
    *most_entries = 0;
    if (!cpa_array_reserve(&memory->packed, &memory->packed_capacity, batch->n_items, sizeof *memory->packed))
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld items", (long long)batch->n_items);
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t entries = entries_of(batch, &batch->items[i]);
        memory->packed[i] = batch->items[i];
        memory->packed[i].table = n;
        n += entries;
        if (entries > *most_entries) *most_entries = entries;
    }
    packed->items = memory->packed;
    packed->n_table_entries = n;
    if (batch->block_tables_on_device) return CPA_OK;
    if (!cpa_array_reserve(&memory->packed_tables, &memory->packed_tables_capacity, n, sizeof *memory->packed_tables))
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld table entries", (long long)n);
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t entries = entries_of(batch, &batch->items[i]);
        if (entries > 0)
            memcpy(memory->packed_tables + memory->packed[i].table, batch->block_tables + batch->items[i].table,
                   (size_t)entries * sizeof *memory->packed_tables);
    }
    packed->block_tables = memory->packed_tables;
    return CPA_OK;
}

/* Where the tables of the items of a batch lie on the device. */
static void find_tables(const cpa_attend_batch *batch, cpa_cuda_table_source *sources) {
    for (int64_t i = 0; i < batch->n_items; i++)
        sources[i] = (cpa_cuda_table_source){.from = batch->items[i].table, .place = -1};
}

static void copy_items(const plan_builder *b, cpa_cuda_item *items, int64_t *rows) {
    *rows = 0;
    for (int64_t i = 0; i < b->given->n_items; i++) {
        const cpa_attend_item *item = &b->given->items[i];
        items[i] =
            (cpa_cuda_item){.item = *item, .state_shift = b->state_shifts ? b->state_shifts[i] : 0, .begin = *rows};
        *rows += cpa_cuda_packed_rows(b->given, item);
    }
}

/* Whether there is a kernel for listed pieces, as far as the batch tells. */
static int may_share(const plan_builder *b, const cpa_cuda_device *device) {
    const cpa_attention_shape *shape = &b->given->shape;
    const int runs_fit = shape->kv_dtype != CPA_INT8 && b->given->block_size >= CPA_CUDA_DECODE_RUN;
    const int tensor_cores = shape->kv_dtype != CPA_F32 && (shape->layout != CPA_VLLM_X || runs_fit);
    return b->given->cascade_attention != CPA_CASCADE_OFF && device->path == CPA_CUDA_HOPPER && b->n_decode > 1 &&
           tensor_cores && !b->full && !b->masked;
}

/* Room for so many blocks in the dtype of the queries. */
static int reserve_widened(cpa_cuda_plan *plan, const cpa_attend_batch *batch, int64_t blocks) {
    return blocks <= INT32_MAX && cpa_cuda_plan_reserve_widened(plan, batch, blocks * batch->block_size);
}

/* Places for the blocks of shared keys, if these have to be widened and there is room. */
static int widens_shared(plan_builder *b, cpa_cuda_plan *plan) {
    int64_t places = 0;
    if (!may_widen(b->given)) return 1;
    for (int64_t i = 0; i < b->cascade->tree.n_nodes; i++) {
        const cpa_attend_item keys = keys_of_node(b, &b->cascade->tree.nodes[i]);
        places += wide_places(b->given, &keys);
    }
    if (b->padded_items > 0) places = cpa_cuda_ceil_div(places, STEADY_WIDENED) * STEADY_WIDENED;
    if (!reserve_widened(plan, b->given, b->n_widened + places)) return 0;
    b->n_widened += places;
    return 1;
}

/* Finds what items share, where that pays, and leaves each with the keys that are its own. */
static cpa_status share_keys(plan_builder *b, cpa_cuda_plan *plan, const cpa_cuda_device *device, cpa_error *err) {
    if (!may_share(b, device)) return CPA_OK;
    CPA_TRY(cpa_cuda_cascade_plan(b->cascade, b->given, b->tile_rows, b->multiprocessors, &b->cut, err));
    if (b->cut.split_keys > 0 && !widens_shared(b, plan)) b->cut = (cpa_cuda_cascade_cut){0};
    if (b->cut.split_keys == 0) return CPA_OK;
    b->own = *b->given;
    b->own.items = b->cascade->own;
    b->batch = &b->own;
    b->n_shared = b->cut.pieces;
    b->n_listed = b->cut.rows;
    if (b->padded_items == 0) return CPA_OK;
    b->n_shared = cpa_cuda_ceil_div(b->n_shared, STEADY_SHARED) * STEADY_SHARED;
    b->n_listed = b->n_shared * cpa_cuda_tile_tokens(b->given, b->tile_rows);
    return CPA_OK;
}

/* The pieces over shared keys; those that fill up have no rows. */
static cpa_status write_shared(const plan_builder *b, char *staging, const cpa_cuda_plan *plan, cpa_error *err) {
    cpa_cuda_piece *pieces = (cpa_cuda_piece *)(staging + plan->shared_at);
    if (b->n_shared == 0) return CPA_OK;
    for (int64_t i = b->cut.pieces; i < b->n_shared; i++) pieces[i] = (cpa_cuda_piece){.partial = -1, .next = -1};
    return cpa_cuda_cascade_write(b->cascade, b->given, b->tile_rows, &b->cut, b->first_ready, pieces,
                                  (cpa_cuda_listed_row *)(staging + plan->rows_at), err);
}

/* Fills a padded plan up with CTAs and items that have nothing to do. A cut leaves a partial state on each side, so
 * there are fewer than two for each CTA; beside shared keys, each unit has one too. */
static void fill_up(plan_builder *b, int64_t ctas, cpa_cuda_item *items, int64_t *rows) {
    for (int64_t i = b->shares.ctas; i < ctas; i++) b->decode[i] = (cpa_cuda_piece){.partial = -1, .next = -1};
    b->shares.ctas = ctas;
    const int64_t alone = b->n_shared > 0 && b->padded_items > ctas ? b->padded_items : ctas;
    const int64_t partial_rows = (ctas + alone) * b->unit_rows + b->n_shared * b->tile_rows;
    if (b->partial_rows < partial_rows) b->partial_rows = partial_rows;
    for (int64_t i = b->batch->n_items; i < b->padded_items; i++) items[i] = (cpa_cuda_item){.begin = *rows};
    *rows = b->padded_items * b->group;
}

/* Whether the launches of the plan are to stay the same: all its items are decode units, of most_rows rows together or
 * less. Few different ones may be the most rows of a unit, since what lies where depends on that. */
static cpa_status choose_padded(plan_builder *b, int64_t most_rows, cpa_error *err) {
    int64_t rows = 0, most = 1;
    if (most_rows == 0 || b->group > CPA_CUDA_DECODE_ROWS) return CPA_OK;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const int64_t count = b->batch->items[i].q_count;
        rows += count;
        while (most < count) most *= 2;
    }
    if (rows > most_rows)
        return cpa_fail(err, CPA_INTERNAL, "attend plan: %lld rows, expected at most the %lld of a padded step",
                        (long long)rows, (long long)most_rows);
    b->unit_rows = most * b->group;
    if (b->n_tiles == 0) b->padded_items = most_rows;
    return CPA_OK;
}

cpa_status cpa_cuda_plan_set(cpa_attend_plan *base, const cpa_attend_batch *given, cpa_attend_fusion fusion,
                             cpa_error *err) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    cpa_cuda_plan_memory *memory = plan->memory;
    cpa_attend_batch packed = *given;
    const cpa_attend_batch *batch = &packed;
    const cpa_cuda_device *device = (const cpa_cuda_device *)base->device;
    plan_builder b = {.given = batch,
                      .batch = batch,
                      .cascade = memory->cascade,
                      .state_shifts = fusion.state_shifts,
                      .first_ready = batch->n_items - fusion.ready_items,
                      .full = fusion.full,
                      .masked = fusion.masked,
                      .group = batch->shape.q_heads / batch->shape.kv_heads,
                      .multiprocessors = device->multiprocessors,
                      .wide_fits = device->base.caps.shared_bytes >= CPA_CUDA_WIDE_BYTES,
                      .tile_rows = device->path == CPA_CUDA_HOPPER
                                       ? cpa_cuda_hopper_rows(batch->shape.k_dim, batch->shape.v_dim)
                                       : CPA_CUDA_PREFILL_ROWS};
    CPA_TRY(cpa_cuda_select(base->device, err));
    plan->base.n_items = 0; /* until the plan is whole again */
    packed.cascade_attention = given->block_tables_on_device ? CPA_CASCADE_OFF : given->cascade_attention;
    if (packs_tables(given)) CPA_TRY(pack_items(memory, given, &packed, &plan->most_entries, err));
    plan->device_tables = given->block_tables_on_device ? given->block_tables : NULL;
    plan->num_blocks = given->num_blocks;
    CPA_TRY(count_work(&b, err));
    CPA_TRY(choose_padded(&b, fusion.padded_items, err));
    CPA_TRY(share_keys(&b, plan, device, err));
    choose_splits(&b);
    const int64_t most_ctas = b.shares.ctas;
    if (!reserve_widened(plan, batch, b.n_widened)) b.n_widened = 0;
    place_sections(plan, &b);
    CPA_TRY(cpa_cuda_plan_reserve_image(plan, plan->image_bytes, err));
    memory->staging = memory->stagings[memory->staging == memory->stagings[0]];
    CPA_TRY(cpa_cuda_plan_reserve_in_order(memory, b.n_pieces, err));
    b.decode = (cpa_cuda_piece *)(memory->staging + plan->decode_at);
    b.prefill = (cpa_cuda_piece *)(memory->staging + plan->prefill_at);
    b.splits = (cpa_cuda_split *)(memory->staging + plan->splits_at);
    b.in_order = memory->in_order;
    memset(memory->staging + plan->counters_at, 0, (size_t)(plan->prefill_at - plan->counters_at));
    cpa_cuda_table_source *sources = NULL;
    if (plan->device_tables) {
        sources = (cpa_cuda_table_source *)(memory->staging + plan->sources_at);
        find_tables(given, sources);
    } else if (batch->n_table_entries) {
        memcpy(memory->staging + plan->tables_at, batch->block_tables,
               (size_t)batch->n_table_entries * sizeof(int32_t));
    }
    cpa_cuda_item *items = (cpa_cuda_item *)(memory->staging + plan->items_at);
    copy_items(&b, items, &plan->rows);
    place_widened(&b, (int32_t *)(memory->staging + plan->widened_tables_at),
                  (int32_t *)(memory->staging + plan->widened_blocks_at), sources);
    split_decode(&b);
    split_prefill(&b);
    sort_prefill(&b);
    choose_order(&b);
    if (b.tail_pieces > 0) cut_tail(&b);
    if (b.padded_items) fill_up(&b, most_ctas, items, &plan->rows);
    CPA_TRY(write_shared(&b, memory->staging, plan, err));
    if (b.partial_rows > INT32_MAX)
        return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: %lld rows of split keys, at most %d",
                        (long long)b.partial_rows, INT32_MAX);
    CPA_TRY(
        cpa_cuda_plan_reserve_partial(plan, b.partial_rows * batch->shape.kv_heads * (batch->shape.v_dim + 1), err));
    memory->current = 0;
    plan->map = batch->map;
    plan->tile_rows = b.tile_rows;
    plan->decode_ctas = (int32_t)b.shares.ctas;
    plan->decode_wide = b.shares.wide;
    plan->n_prefill = (int32_t)b.n_pieces;
    plan->by_head = (int32_t)b.by_head;
    plan->n_splits = (int32_t)b.n_splits;
    plan->n_widened = (int32_t)b.n_widened;
    plan->n_shared = (int32_t)b.n_shared;
    plan->partial_rows = b.partial_rows;
    cpa_attend_plan_describe(base, batch, fusion);
    if (b.n_shared > 0) base->keys_read -= cpa_cascade_keys_saved(&b.cascade->tree);
    if (b.padded_items) base->n_items = b.padded_items;
    return CPA_OK;
}

uint64_t cpa_cuda_plan_shape(const cpa_attend_plan *base) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    const uint64_t shape[] = {
        (uint64_t)base->n_items,           (uint64_t)plan->rows,
        (uint64_t)base->fusion.ready_row,  (uint64_t)base->fusion.ready_rows,
        (uint64_t)plan->decode_ctas,       (uint64_t)plan->decode_wide,
        (uint64_t)plan->tile_rows,         (uint64_t)plan->n_prefill,
        (uint64_t)plan->by_head,           (uint64_t)plan->n_splits,
        (uint64_t)plan->partial_rows,      (uint64_t)plan->image_bytes,
        (uint64_t)plan->tables_at,         (uint64_t)plan->decode_at,
        (uint64_t)plan->counters_at,       (uint64_t)plan->prefill_at,
        (uint64_t)plan->splits_at,         (uint64_t)plan->widened_tables_at,
        (uint64_t)plan->widened_blocks_at, (uint64_t)plan->n_widened,
        (uint64_t)plan->n_shared,          (uint64_t)plan->shared_at,
        (uint64_t)plan->rows_at,           (uintptr_t)plan->memory->image,
        (uintptr_t)plan->memory->partial,  (uintptr_t)plan->memory->widened,
    };
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}
