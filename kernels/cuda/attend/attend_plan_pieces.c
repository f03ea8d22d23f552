/* The pieces of a plan.
 *
 * Decode: units whose pieces are no more than the CTAs that run at once are cut evenly, a piece a CTA. Otherwise the
 * keys of all units lie in a row, cut into as many equal stretches as there are CTAs; a unit that a cut crosses leaves
 * a partial state on each side. Units that are ready go to the first CTAs, which find room beside the kernel that the
 * others wait for. Where a group has more rows than a CTA takes, teams of CTAs do all this. Prefill: one CTA a tile,
 * the longest first, cut only where there are too few tiles to fill the device, or where those that come last would
 * leave most of it idle. All but the last run for one KV head after the other: CTAs that run at once then read the same
 * keys, which stay in the L2 cache. */
#include "base/check.h"
#include "kernels/cuda/attend/attend_plan.h"
#include "kernels/cuda/attend/attend_tiles.h"

enum {
    LEAST_TAIL_PIECE = 1024, /* keys */
    MOST_TAIL_CUTS = 8,      /* of one of the last tiles */
    TAIL_WAVES = 2           /* the last tiles run for all KV heads at once, so that they are the shortest of all */
};

cpa_status cpa_cuda_plan_count_work(cpa_cuda_plan_builder *b, cpa_error *err) {
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        int64_t rows = cpa_cuda_packed_rows(b->batch, item);
        if (rows > INT32_MAX / 2 || item->k_count > INT32_MAX / 2)
            return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: items[%lld] has %lld rows and %lld keys, at most %d",
                            (long long)i, (long long)rows, (long long)item->k_count, INT32_MAX / 2);
        if (rows == 0) continue;
        if (cpa_cuda_is_decode(b, item)) {
            b->n_decode += cpa_cuda_decode_units(b->team, rows);
        } else {
            int64_t tiles = cpa_cuda_prefill_tiles(b->batch, item, b->tile_rows),
                    keys = cpa_cuda_ceil_div(item->k_count, CPA_CUDA_PREFILL_KEYS);
            b->n_tiles += tiles;
            b->tile_keys += tiles * keys;
            if (keys > b->most_keys) b->most_keys = keys;
        }
    }
    return CPA_OK;
}

static int64_t state_shift(const cpa_cuda_plan_builder *b, const cpa_attend_item *item) {
    return b->state_shifts ? b->state_shifts[item - b->batch->items] : 0;
}

static int is_ready(const cpa_cuda_plan_builder *b, const cpa_attend_item *item) {
    return item - b->batch->items >= b->first_ready;
}

/* Where the tiles fill the device a few times at most, the cut that makes `waves` full waves of pieces of about the
 * same length, for the number of waves that is done first. */
static void choose_prefill_split(cpa_cuda_plan_builder *b) {
    const int64_t heads = b->batch->shape.kv_heads, device = b->multiprocessors;
    int64_t least = INT64_MAX;
    if (b->n_tiles * heads >= CPA_CUDA_PREFILL_WAVES * device) return;
    for (int64_t waves = 1; waves <= CPA_CUDA_PREFILL_WAVES; waves++) {
        const int64_t places = waves * device, shortest = cpa_cuda_shortest_split(b->tile_keys, heads, places);
        const int64_t tiles = cpa_cuda_least_split(b->batch, b->tile_rows, shortest, b->most_keys, places / heads);
        const int64_t pieces = cpa_cuda_prefill_pieces(b->batch, b->tile_rows, tiles * CPA_CUDA_PREFILL_KEYS);
        const int64_t cost = cpa_cuda_split_cost(pieces, heads, device, tiles);
        if (cost < least) {
            least = cost;
            b->split_keys = tiles * CPA_CUDA_PREFILL_KEYS;
        }
    }
}

void cpa_cuda_plan_choose_splits(cpa_cuda_plan_builder *b) {
    b->shares = cpa_cuda_share_decode(b->batch, b->decode_rows, b->multiprocessors, b->wide_fits);
    b->split_keys = INT32_MAX;
    if (b->n_tiles == 0) return;
    choose_prefill_split(b);
    b->n_pieces = cpa_cuda_prefill_pieces(b->batch, b->tile_rows, b->split_keys);
    if (b->split_keys == INT32_MAX)
        b->tail_pieces = (MOST_TAIL_CUTS - 1) * (b->n_pieces < b->multiprocessors ? b->n_pieces : b->multiprocessors);
}

/* A tile of the item's rows against all its keys. */
static cpa_cuda_piece whole_tile(const cpa_cuda_plan_builder *b, const cpa_attend_item *item, int64_t row_begin,
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
                            .ready = cpa_cuda_is_decode(b, item) && is_ready(b, item)};
}

/* Notes that the rows of a tile come from `count` pieces, whose states follow each other in the work space. */
static void add_split(cpa_cuda_plan_builder *b, const cpa_cuda_piece *tile, int64_t count) {
    b->splits[b->n_splits++] = (cpa_cuda_split){.q_row = tile->q_row,
                                                .state_shift = tile->state_shift,
                                                .row_begin = tile->row_begin,
                                                .row_end = tile->row_end,
                                                .partial = (int32_t)b->partial_rows,
                                                .count = (int32_t)count};
    b->partial_rows += count * (tile->row_end - tile->row_begin);
}

/* Assigns decode pieces to teams: the first of each at its own place, the others after those, linked. A place holds a
 * piece for each CTA of a team. */
typedef struct decode_assignment {
    cpa_cuda_piece *last; /* at the place of the current team's last pieces; NULL: it has none yet */
    cpa_cuda_decode_turn turn;
    int64_t extra; /* the next place of pieces that are not the first of a team */
} decode_assignment;

/* The place of the next pieces, of `take` tiles of the unit. */
static cpa_cuda_piece *assign_pieces(cpa_cuda_plan_builder *b, decode_assignment *to, cpa_cuda_decode_unit *unit,
                                     int64_t *take) {
    const int64_t team = to->turn.team, ctas = b->team.ctas;
    *take = cpa_cuda_assign_piece(&b->shares, &to->turn, unit);
    if (to->turn.team != team) to->last = NULL;
    const int64_t at = (to->last ? to->extra++ : to->turn.team) * ctas;
    for (int64_t cta = 0; cta < ctas && to->last; cta++) to->last[cta].next = (int32_t)(at + cta);
    return to->last = &b->decode[at];
}

/* The pieces of a tile learn of each other: `first`, and those that teams after its own begin with, `next` on. */
static void join_decode(cpa_cuda_plan_builder *b, cpa_cuda_piece *first, cpa_cuda_piece *next, int64_t pieces,
                        int64_t shared) {
    const int32_t rows = first->row_end - first->row_begin;
    for (int64_t i = 0; i < pieces; i++) {
        cpa_cuda_piece *piece = i == 0 ? first : next + (i - 1) * b->team.ctas;
        piece->partial = (int32_t)(b->partial_rows + (shared + i) * rows);
        piece->pieces = (int32_t)pieces;
        piece->states = (int32_t)(shared + pieces);
        piece->first_partial = (int32_t)b->partial_rows;
        piece->counter = (int32_t)b->n_decode_splits;
    }
    b->n_decode_splits++;
    b->partial_rows += (shared + pieces) * rows;
}

/* States of shared keys that the rows of an item begin with, and what is to lie where the others will, and before those
 * of its own pieces. */
static int64_t shared_states(const cpa_cuda_plan_builder *b, const cpa_attend_item *item, int64_t pieces) {
    if (b->cut.split_keys == 0) return 0;
    cpa_cuda_cascade_item *shared = &b->cascade->items[item - b->batch->items];
    shared->first_partial = (int32_t)b->partial_rows;
    shared->all_states = (int32_t)(shared->states + pieces);
    return shared->states;
}

/* The pieces of an item's unit. */
static void write_unit(cpa_cuda_plan_builder *b, decode_assignment *to, const cpa_attend_item *item, int32_t of_item) {
    const int64_t tiles = cpa_cuda_ceil_div(item->k_count, CPA_CUDA_DECODE_KEYS);
    const int32_t rows = (int32_t)cpa_cuda_packed_rows(b->batch, item), ctas = b->team.ctas;
    cpa_cuda_decode_unit unit = cpa_cuda_decode_unit_of(&b->shares, tiles);
    int64_t done = 0, pieces = 0, next_team = 0, take;
    cpa_cuda_piece *first = NULL;
    do {
        cpa_cuda_piece *piece = assign_pieces(b, to, &unit, &take);
        for (int32_t cta = 0; cta < ctas; cta++) {
            const cpa_cuda_row_tile tile = cpa_cuda_row_tile_of(b->team, rows, of_item, cta);
            piece[cta] = whole_tile(b, item, tile.begin, tile.end);
            piece[cta].k_begin = (int32_t)(done * CPA_CUDA_DECODE_KEYS);
            if (unit.left > 0) piece[cta].k_end = (int32_t)((done + take) * CPA_CUDA_DECODE_KEYS);
        }
        if (pieces == 0) first = piece, next_team = to->turn.team + 1;
        done += take;
        pieces++;
    } while (done < tiles);
    const int64_t shared = shared_states(b, item, pieces);
    for (int32_t cta = 0; cta < ctas && (pieces > 1 || shared > 0); cta++)
        join_decode(b, first + cta, &b->decode[next_team * ctas + cta], pieces, shared);
}

/* Those that are ready come first. */
void cpa_cuda_plan_write_decode(cpa_cuda_plan_builder *b) {
    decode_assignment assignment = {.extra = b->shares.teams};
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[(b->first_ready + i) % b->batch->n_items];
        if (!cpa_cuda_is_decode(b, item)) continue;
        const int64_t units = cpa_cuda_decode_units(b->team, cpa_cuda_packed_rows(b->batch, item));
        for (int64_t unit = 0; unit < units; unit++) write_unit(b, &assignment, item, (int32_t)unit);
    }
    b->shares.teams = b->n_decode > 0 ? assignment.turn.team + 1 : 0;
}

static int64_t visible_keys(const cpa_cuda_plan_builder *b, const cpa_cuda_piece *piece) {
    return cpa_cuda_visible_keys(b->batch->map, piece, b->group, b->full);
}

/* The pieces of prefill tiles in the order of rows and keys, with what they cost. */
static void split_prefill(cpa_cuda_plan_builder *b) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        int64_t rows = cpa_cuda_packed_rows(b->batch, item), cuts = cpa_cuda_ceil_div(item->k_count, b->split_keys);
        if (rows == 0 || cpa_cuda_is_decode(b, item)) continue;
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
static void sort_prefill(cpa_cuda_plan_builder *b) {
    int64_t begin[CPA_CUDA_COST_BUCKETS + 1] = {0}, most = 1;
    for (int64_t i = 0; i < b->n_pieces; i++) {
        if (b->in_order[i].cost > most) most = b->in_order[i].cost;
    }
    for (int64_t i = 0; i < b->n_pieces; i++) begin[cpa_cuda_cost_bucket(b->in_order[i].cost, most) + 1]++;
    for (int64_t i = 0; i < CPA_CUDA_COST_BUCKETS; i++) begin[i + 1] += begin[i];
    for (int64_t i = 0; i < b->n_pieces; i++)
        b->prefill[begin[cpa_cuda_cost_bucket(b->in_order[i].cost, most)]++] = b->in_order[i].piece;
}

/* Into how many pieces a tile of `cost` keys is cut when `left` keys remain, its own included (guided self-scheduling,
 * Polychronopoulos and Kuck, 1987): none shall take longer than what a multiprocessor still has to do. */
static int64_t tail_cuts(const cpa_cuda_plan_builder *b, int64_t cost, int64_t left) {
    const int64_t share = left * b->batch->shape.kv_heads / b->multiprocessors;
    const int64_t most = cost / LEAST_TAIL_PIECE < MOST_TAIL_CUTS ? cost / LEAST_TAIL_PIECE : MOST_TAIL_CUTS;
    const int64_t cuts = share > 0 ? (cost + share / 2) / share : most;
    return cuts < most ? cuts : most;
}

/* Pieces of whole tiles of keys that share what the tile's rows see, `cost` keys. */
static void cut_tile(cpa_cuda_plan_builder *b, const cpa_cuda_piece *tile, int64_t cost, int64_t cuts) {
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

/* Whether the L2 cache holds what the heads of any segment read. Rows of tensors have those of all heads side by side,
 * and memory gives them best at once. */
static int heads_fit(const cpa_cuda_plan_builder *b) {
    const int64_t most_bytes = 24 << 20, keys = b->most_keys * CPA_CUDA_PREFILL_KEYS; /* half of the cache of 9.0 */
    const cpa_attention_shape *shape = &b->batch->shape;
    return b->batch->block_size == CPA_TENSOR_BLOCK &&
           keys * shape->kv_heads * (shape->k_dim + shape->v_dim) * 2 <= most_bytes;
}

/* All but the last tiles go head by head, if they fill the device often enough. */
static void choose_order(cpa_cuda_plan_builder *b) {
    if (b->split_keys < INT32_MAX || heads_fit(b)) return;
    const int64_t tail = cpa_cuda_ceil_div(TAIL_WAVES * b->multiprocessors, b->batch->shape.kv_heads);
    b->by_head = b->n_pieces > tail ? b->n_pieces - tail : 0;
}

/* Cuts the last of the sorted tiles, as long as there is room. */
static void cut_tail(cpa_cuda_plan_builder *b) {
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

void cpa_cuda_plan_place_prefill(const cpa_cuda_plan_builder *b, cpa_cuda_prefill *set, int64_t *end) {
    set->pieces_at = cpa_cuda_place_section(end, (b->n_pieces + b->tail_pieces) * (int64_t)sizeof(cpa_cuda_piece));
    set->splits_at = cpa_cuda_place_section(end, b->n_tiles * (int64_t)sizeof(cpa_cuda_split));
}

void cpa_cuda_plan_write_prefill(cpa_cuda_plan_builder *b, char *image, cpa_cuda_prefill *set) {
    b->prefill = (cpa_cuda_piece *)(image + set->pieces_at);
    b->splits = (cpa_cuda_split *)(image + set->splits_at);
    split_prefill(b);
    sort_prefill(b);
    choose_order(b);
    if (b->tail_pieces > 0) cut_tail(b);
    set->n_pieces = (int32_t)b->n_pieces;
    set->n_splits = (int32_t)b->n_splits;
    set->by_head = (int32_t)b->by_head;
}
