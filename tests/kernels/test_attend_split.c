/* Where the CUDA plan cuts: how decode units are dealt to CTAs, and the search for the cut of prefill tiles against one
 * step after the other. Needs no device. */
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "kernels/cuda/attend/attend_assign.h"
#include "kernels/cuda/attend/attend_plan.h"
#include "kernels/cuda/attend/attend_tiles.h"
#include "kernels/cuda/attend/attend_tokens.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_ITEMS = 12, BATCHES = 2000, TILE_ROWS = 128 };

static cpa_attend_batch random_batch(cpa_attend_item *items) {
    static const int32_t groups[] = {1, 2, 4, 8, 32};
    const cpa_attend_batch batch = {.shape.q_heads = groups[cpa_test_random_below(5)],
                                    .shape.kv_heads = 1,
                                    .items = items,
                                    .n_items = cpa_test_random_below(MOST_ITEMS + 1)};
    for (int64_t i = 0; i < batch.n_items; i++) {
        const int64_t most_rows = cpa_test_random_below(3) ? 3000 : 3,
                      most_keys = cpa_test_random_below(2) ? 70000 : 300;
        items[i] =
            (cpa_attend_item){.q_count = cpa_test_random_below(most_rows), .k_count = cpa_test_random_below(most_keys)};
    }
    return batch;
}

static int64_t pieces_at(const cpa_attend_batch *batch, int64_t split) {
    return cpa_cuda_prefill_pieces(batch, TILE_ROWS, split * CPA_CUDA_PREFILL_KEYS);
}

static void the_search_finds_what_single_steps_find(void) {
    int64_t wrong = 0, searched = 0;
    for (int i = 0; i < BATCHES; i++) {
        cpa_attend_item items[MOST_ITEMS];
        const cpa_attend_batch batch = random_batch(items);
        const int64_t first = 1 + cpa_test_random_below(20), most = cpa_test_random_below(600);
        const int64_t fewest = pieces_at(&batch, 1 << 20), room = pieces_at(&batch, first) - fewest;
        const int64_t most_pieces = fewest - 1 + cpa_test_random_below(room + 3);
        int64_t split = first;
        while (split < most && pieces_at(&batch, split) > most_pieces) split++;
        wrong += cpa_cuda_least_split(&batch, TILE_ROWS, first, most, most_pieces) != split;
        searched += split > first && split < most;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(searched, >, BATCHES / 4);
}

static void only_tiles_of_prefill_count(void) {
    const cpa_attend_item items[] = {
        {.q_count = 0, .k_count = 500},   /* no rows */
        {.q_count = 4, .k_count = 90000}, /* 16 packed rows: decode */
        {.q_count = 5, .k_count = 0},     /* no keys: one piece, which writes the empty state */
        {.q_count = 65, .k_count = 1025}, /* three tiles */
    };
    const cpa_attend_batch batch = {.shape.q_heads = 8, .shape.kv_heads = 2, .items = items, .n_items = 4};
    CU_ASSERT_EQUAL(cpa_cuda_prefill_tiles(&batch, &items[0], TILE_ROWS), 0);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_tiles(&batch, &items[1], TILE_ROWS), 0);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_tiles(&batch, &items[2], TILE_ROWS), 1);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_tiles(&batch, &items[3], TILE_ROWS), 3);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_tiles(&batch, &items[3], 192), 2);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_pieces(&batch, TILE_ROWS, 1024), 1 + 3 * 2);
    CU_ASSERT_EQUAL(cpa_cuda_prefill_pieces(&batch, TILE_ROWS, 1152), 1 + 3);
}

/* Units of equal length on 132 multiprocessors, 32 heads over 8. */
static cpa_cuda_decode_shares shares_on(int wide_fits, int32_t block_size, int64_t units, int64_t keys,
                                        cpa_dtype kv_dtype) {
    cpa_attend_item items[128] = {0};
    for (int64_t i = 0; i < units; i++) items[i] = (cpa_attend_item){.q_count = 1, .k_count = keys};
    const cpa_attend_batch batch = {.shape.q_heads = 32,
                                    .shape.kv_heads = 8,
                                    .shape.k_dim = 128,
                                    .shape.v_dim = 128,
                                    .shape.kv_dtype = kv_dtype,
                                    .block_size = block_size,
                                    .items = items,
                                    .n_items = units};
    return cpa_cuda_share_decode(&batch, 16, 132, wide_fits);
}

static cpa_cuda_decode_shares shares_of(int64_t units, int64_t keys, cpa_dtype kv_dtype) {
    return shares_on(1, 64, units, keys, kv_dtype);
}

static void decode_units_that_fit_are_cut_evenly(void) {
    const cpa_cuda_decode_shares one = shares_of(1, 16384, CPA_BF16), few = shares_of(16, 1024, CPA_BF16);
    CU_ASSERT(one.apart && one.wide && one.teams == 16 && one.longest == 256 / 16);
    CU_ASSERT(few.apart && few.wide && few.longest == 16);                      /* a CTA each */
    const cpa_cuda_decode_shares narrow = shares_on(0, 64, 1, 16384, CPA_BF16); /* a device of 8.x */
    CU_ASSERT(narrow.apart && !narrow.wide && narrow.teams == 33 && narrow.longest == 8);
    const cpa_cuda_decode_shares uneven = shares_of(10, 2048, CPA_BF16);
    CU_ASSERT(uneven.apart && !uneven.wide && uneven.teams == 33 && uneven.longest == 11); /* 3 CTAs of 11, 11, 10 */
    const cpa_cuda_decode_shares many = shares_of(128, 1024, CPA_BF16);
    CU_ASSERT(!many.apart && !many.wide && many.teams == 33);
    CU_ASSERT_EQUAL(many.cap, (128 * (16 + CPA_CUDA_DECODE_OVERHEAD) + 32) / 33 + CPA_CUDA_DECODE_OVERHEAD);
    const cpa_cuda_decode_shares codes = shares_of(1, 1024, CPA_INT8); /* two heads a CTA */
    CU_ASSERT(codes.apart && !codes.wide && codes.teams == 66 && codes.longest == 1);
    CU_ASSERT_EQUAL(cpa_cuda_decode_pieces(0, codes.cap), 1);
    CU_ASSERT_EQUAL(cpa_cuda_decode_pieces(11, CPA_CUDA_DECODE_OVERHEAD + 5), 3);
}

/* Where rows of eight heads lie side by side and there is enough to do, a CTA has them all. */
static void many_keys_of_turboquant_are_taken_token_by_token(void) {
    const cpa_cuda_decode_shares many = shares_of(16, 65536, CPA_TQ_4BIT), ragged = shares_of(64, 1100, CPA_TQ_3BIT);
    CU_ASSERT(many.wide && !many.apart && many.teams == 132);
    CU_ASSERT_EQUAL(many.cap, (16 * (1024 + CPA_CUDA_DECODE_OVERHEAD) + 131) / 132 + CPA_CUDA_DECODE_OVERHEAD);
    CU_ASSERT(ragged.wide && ragged.apart && ragged.teams == 132 && ragged.longest == 9);
    const cpa_cuda_decode_shares one = shares_of(1, 65536, CPA_TQ_4BIT); /* 128 states would be joined by one CTA */
    CU_ASSERT(!one.wide && one.apart && one.teams == 16);
    CU_ASSERT(!shares_of(16, 65536, CPA_TQ_K8V4).wide && !shares_on(0, 64, 16, 65536, CPA_TQ_4BIT).wide);
    CU_ASSERT(!shares_on(1, 8, 16, 65536, CPA_TQ_4BIT).wide && !shares_of(16, 65536, CPA_INT8).wide);
    cpa_attention_shape shape = {.kv_heads = 8, .k_dim = 128, .v_dim = 128, .kv_dtype = CPA_TQ_4BIT};
    CU_ASSERT(cpa_cuda_takes_tokens(&shape, 64));
    shape.layout = CPA_HEAD_MAJOR; /* rows of tokens lie side by side */
    CU_ASSERT(!cpa_cuda_takes_tokens(&shape, 64));
}

/* ---- groups of more heads than a CTA takes rows ---- */

static void a_group_that_a_cta_does_not_hold_takes_a_team(void) {
    static const struct {
        int32_t q_heads, kv_heads, dim, block_size;
        cpa_dtype kv_dtype;
        cpa_cuda_team team;
        int32_t padded_rows;
    } cases[] = {
        {32, 8, 128, 64, CPA_BF16, {1, 32, 32}, 32},    {32, 8, 64, 64, CPA_BF16, {1, 16, 16}, 16},
        {32, 1, 128, 64, CPA_BF16, {1, 32, 32}, 32},    {33, 1, 128, 64, CPA_BF16, {2, 32, 33}, 512},
        {128, 1, 128, 16, CPA_BF16, {4, 32, 128}, 512}, {128, 1, 128, 8, CPA_BF16, {8, 16, 128}, 512},
        {17, 1, 64, 16, CPA_BF16, {2, 16, 17}, 512},    {256, 2, 128, 64, CPA_FP8_E4M3, {8, 16, 128}, 512},
        {16, 1, 576, 64, CPA_BF16, {1, 64, 64}, 512},   {128, 1, 576, 64, CPA_FP8_T128, {2, 64, 128}, 512},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const cpa_attention_shape shape = {.q_heads = cases[i].q_heads,
                                           .kv_heads = cases[i].kv_heads,
                                           .k_dim = cases[i].dim,
                                           .v_dim = cases[i].dim,
                                           .v_in_k = cases[i].dim == 576, /* latents */
                                           .kv_dtype = cases[i].kv_dtype};
        const cpa_cuda_team team = cpa_cuda_team_of(&shape, cases[i].block_size);
        CU_ASSERT_EQUAL(memcmp(&team, &cases[i].team, sizeof team), 0);
        CU_ASSERT_EQUAL(cpa_cuda_most_padded_rows(&shape, cases[i].block_size), cases[i].padded_rows);
    }
}

/* The same kernel runs whatever a step has, even nothing: on 132 multiprocessors, 128 heads over one. */
static void teams_do_not_depend_on_the_batch(void) {
    cpa_attend_item items[64];
    for (int64_t i = 0; i < 64; i++) items[i] = (cpa_attend_item){.q_count = 1 + i % 4, .k_count = 16384};
    for (int64_t n = 0; n <= 64; n += 16) {
        const cpa_attend_batch batch = {
            .shape = {.q_heads = 128, .kv_heads = 1, .k_dim = 128, .v_dim = 128, .kv_dtype = CPA_BF16},
            .block_size = 64,
            .items = items,
            .n_items = n};
        const cpa_cuda_decode_shares shares = cpa_cuda_share_decode(&batch, CPA_CUDA_MOST_DECODE_ROWS, 132, 1);
        CU_ASSERT(shares.teams == 66 && shares.row_tiles == 2 && !shares.wide);
    }
}

/* A batch of decode with the pieces that are dealt for it, and what they were seen to take. */
enum { DEALT_ITEMS = 40, DEALT_PIECES = 1 << 14, DEALT_STATES = 1 << 18, MOST_TILES = 1 << 9 };
typedef struct dealt_batch {
    cpa_attend_item items[DEALT_ITEMS];
    cpa_attend_batch batch;
    cpa_cuda_plan_builder plan;
    cpa_cuda_piece pieces[DEALT_PIECES];
    uint8_t met[DEALT_ITEMS][CPA_CUDA_MOST_DECODE_ROWS][MOST_TILES]; /* each row each tile of keys */
    uint8_t states[DEALT_STATES];                           /* of the work space, by how many pieces leave them */
    uint16_t counted[DEALT_PIECES], expected[DEALT_PIECES]; /* pieces at each counter, and of its tile */
} dealt_batch;

static void deal_batch(dealt_batch *b) {
    static const int32_t groups[] = {1, 4, 8, 16, 17, 32, 33, 64, 96, 128, 200}, dims[] = {64, 128, 256};
    static const cpa_dtype dtypes[] = {CPA_BF16, CPA_FP8_E4M3, CPA_TQ_4BIT};
    const int32_t group = groups[cpa_test_random_below(11)], dim = dims[cpa_test_random_below(3)];
    const int32_t v_in_k = cpa_test_random_below(4) == 0;
    static const int32_t heads[] = {1, 2, 3, 8};
    const int32_t kv_heads = v_in_k ? 1 : heads[cpa_test_random_below(4)];
    const int64_t most_rows = CPA_CUDA_MOST_DECODE_ROWS / group < 4 ? CPA_CUDA_MOST_DECODE_ROWS / group : 4;
    const int64_t most_keys = cpa_test_random_below(2) ? 64 * MOST_TILES : 300;
    b->batch = (cpa_attend_batch){.shape = {.q_heads = group * kv_heads,
                                            .kv_heads = kv_heads,
                                            .k_dim = dim,
                                            .v_dim = dim,
                                            .v_in_k = v_in_k,
                                            .kv_dtype = dtypes[cpa_test_random_below(v_in_k ? 2 : 3)]},
                                  .block_size = cpa_test_random_below(2) ? 8 : 64,
                                  .items = b->items,
                                  .n_items = cpa_test_random_below(DEALT_ITEMS + 1)};
    for (int64_t i = 0; i < b->batch.n_items; i++)
        b->items[i] = (cpa_attend_item){.q_row = i,
                                        .q_count = cpa_test_random_below(most_rows + 1),
                                        .k_count = cpa_test_random_below(most_keys + 1)};
    b->plan = (cpa_cuda_plan_builder){.given = &b->batch,
                                      .batch = &b->batch,
                                      .first_ready = cpa_test_random_below(b->batch.n_items + 1),
                                      .group = group,
                                      .multiprocessors = cpa_test_random_below(2) ? 132 : 5,
                                      .wide_fits = 1,
                                      .decode_rows = CPA_CUDA_MOST_DECODE_ROWS,
                                      .team = cpa_cuda_team_of(&b->batch.shape, b->batch.block_size),
                                      .decode = b->pieces};
    for (int64_t i = 0; i < b->batch.n_items; i++)
        b->plan.n_decode += cpa_cuda_decode_units(b->plan.team, b->items[i].q_count * group);
    memset(b->pieces, 0xff, sizeof b->pieces);
    memset(b->met, 0, sizeof b->met);
    memset(b->states, 0, sizeof b->states);
    memset(b->counted, 0, sizeof b->counted);
}

/* Notes what a piece takes; how much of that is wrong in itself. */
static int64_t note_piece(dealt_batch *b, const cpa_cuda_piece *piece) {
    const cpa_attend_item *item = &b->items[piece->q_row];
    const int32_t rows = piece->row_end - piece->row_begin;
    int64_t wrong = rows < 1 || rows > b->plan.team.tile || piece->row_end > item->q_count * b->plan.group;
    wrong += piece->k_begin % CPA_CUDA_DECODE_KEYS != 0 || piece->k_end > item->k_count;
    wrong += piece->ready != (piece->q_row >= b->plan.first_ready);
    if (wrong > 0) return wrong;
    for (int32_t row = piece->row_begin; row < piece->row_end; row++)
        for (int32_t key = piece->k_begin; key < piece->k_end; key += CPA_CUDA_DECODE_KEYS)
            b->met[piece->q_row][row][key / CPA_CUDA_DECODE_KEYS]++;
    if (piece->partial < 0) return piece->k_begin != 0 || piece->k_end != item->k_count;
    wrong += (piece->partial - piece->first_partial) % rows != 0 || piece->states != piece->pieces;
    wrong += piece->partial >= piece->first_partial + piece->pieces * rows || piece->counter < 0;
    for (int32_t row = 0; row < rows; row++) wrong += b->states[piece->partial + row]++;
    b->counted[piece->counter]++;
    b->expected[piece->counter] = (uint16_t)piece->pieces;
    return wrong;
}

/* CTAs of a team have the same keys of the same item, one after the other, and rows that go on from each other's. */
static int64_t walk_team(dealt_batch *b, int64_t team) {
    const int32_t ctas = b->plan.team.ctas;
    int64_t wrong = 0;
    for (int64_t at = team * ctas; at >= 0; at = b->pieces[at].next) {
        const cpa_cuda_piece *first = &b->pieces[at];
        wrong += at % ctas != 0 || first->row_begin % b->plan.team.rows != 0;
        for (int32_t cta = 0; cta < ctas; cta++) {
            const cpa_cuda_piece *piece = first + cta;
            wrong += piece->q_row != first->q_row || piece->k_begin != first->k_begin || piece->k_end != first->k_end;
            wrong += cta > 0 && piece->row_begin != piece[-1].row_end;
            wrong += piece->next != (first->next < 0 ? -1 : first->next + cta);
            wrong += note_piece(b, piece);
        }
        if (wrong > 0) break;
    }
    return wrong;
}

static int64_t count_unmet(const dealt_batch *b) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < b->batch.n_items; i++)
        for (int64_t row = 0; row < b->items[i].q_count * b->plan.group; row++)
            for (int64_t tile = 0; tile < cpa_cuda_ceil_div(b->items[i].k_count, CPA_CUDA_DECODE_KEYS); tile++)
                wrong += b->met[i][row][tile] != 1;
    for (int64_t row = 0; row < b->plan.partial_rows; row++) wrong += b->states[row] != 1;
    for (int64_t i = 0; i < b->plan.n_decode_splits; i++) wrong += b->counted[i] != b->expected[i];
    return wrong;
}

/* The pieces of a batch as an update of a reserved plan deals them. */
static void update_pieces(dealt_batch *b) {
    static cpa_cuda_item items[DEALT_ITEMS];
    static cpa_cuda_unit units[DEALT_PIECES];
    static cpa_cuda_cut cuts[DEALT_PIECES];
    const cpa_cuda_decode_shares shares = b->plan.shares;
    const cpa_cuda_update_args a = {.group = b->plan.group,
                                    .teams = (int32_t)shares.teams,
                                    .team = b->plan.team,
                                    .items = items,
                                    .units = units,
                                    .cuts = cuts,
                                    .pieces = b->pieces};
    cpa_cuda_assigner to = {.units = 0};
    for (int64_t i = 0; i < b->batch.n_items; i++)
        items[i] = (cpa_cuda_item){.item = b->items[i], .ready = i >= b->plan.first_ready};
    for (int64_t i = 0; i < b->batch.n_items; i++) {
        const int64_t at = (b->plan.first_ready + i) % b->batch.n_items;
        const int64_t tiles = cpa_cuda_ceil_div(b->items[at].k_count, CPA_CUDA_DECODE_KEYS);
        cpa_cuda_assign_item(&a, &shares, &to, cpa_cuda_decode_unit_of(&shares, tiles), (int32_t)at,
                             (int32_t)b->items[at].q_count * a.group);
    }
    for (int32_t cut = 0; cut < to.cuts; cut++)
        for (int32_t cta = 0; cta < a.team.ctas; cta++) cpa_cuda_write_cut(&a, cut, cta, to.cuts);
    b->plan.shares.teams = to.cuts > 0 ? to.turn.team + 1 : 0;
    b->plan.partial_rows = to.partial_rows;
    b->plan.n_decode_splits = to.splits;
}

/* As the host deals them, or an update. */
static void deal_and_walk(void (*deal)(dealt_batch *b)) {
    dealt_batch *b = calloc(1, sizeof *b);
    int64_t teams = 0;
    for (int trial = 0; trial < 200; trial++) {
        int64_t wrong = 0;
        deal_batch(b);
        cpa_cuda_plan_choose_splits(&b->plan);
        const int64_t room = (b->plan.n_decode + b->plan.shares.teams) * b->plan.team.ctas;
        const int64_t most_teams = b->plan.shares.teams, rows = b->plan.team.rows;
        CU_ASSERT_FATAL(room < DEALT_PIECES);
        deal(b);
        CU_ASSERT_FATAL(b->plan.partial_rows <= 2 * most_teams * rows && b->plan.partial_rows <= DEALT_STATES);
        wrong += b->plan.n_decode_splits > cpa_min64(b->plan.n_decode, most_teams) * b->plan.team.ctas;
        for (int64_t team = 0; team < b->plan.shares.teams; team++) wrong += walk_team(b, team);
        wrong += count_unmet(b);
        for (size_t i = 0; i < sizeof(cpa_cuda_piece); i++) wrong += ((uint8_t *)&b->pieces[room])[i] != 0xff;
        CU_ASSERT_EQUAL(wrong, 0);
        teams += b->plan.team.ctas > 1 && b->plan.n_decode_splits > 0;
    }
    CPA_ASSERT_ORDER(teams, >, 20);
    free(b);
}

static void write_pieces(dealt_batch *b) {
    cpa_cuda_plan_write_decode(&b->plan);
}

static void every_row_meets_each_key_of_its_item_once(void) {
    deal_and_walk(write_pieces);
    deal_and_walk(update_pieces);
}

/* ---- prefill pieces of an update ---- */

enum { TILED_PIECES = 4096, TILED_SPLITS = 2048 };

typedef struct tiled_batch {
    cpa_attend_item items[MOST_ITEMS];
    cpa_attend_batch batch;
    cpa_cuda_plan_builder plan;
    cpa_cuda_costed_piece in_order[TILED_PIECES];
    cpa_cuda_piece pieces[TILED_PIECES];   /* of the plan that is set, the longest first */
    cpa_cuda_split splits[TILED_SPLITS];   /* of that plan */
    cpa_cuda_item updated[MOST_ITEMS];     /* items as an update has them */
    cpa_cuda_tiled_item tiled[MOST_ITEMS]; /* those of them that are cut into tiles */
} tiled_batch;

/* Items of many rows and of few, whose tiles fill a device fewer than three times or more often. */
static void plan_tiles(tiled_batch *b) {
    b->batch = random_batch(b->items);
    b->batch.map = (cpa_owner_map){1, 64};
    b->batch.shape.q_heads = 1 << cpa_test_random_below(3);
    b->batch.block_size = 64;
    for (int64_t i = 0; i < b->batch.n_items; i++) {
        cpa_attend_item *item = &b->items[i];
        item->q_row = 10000 * i, item->table = 1000 * i;
        item->k_count += item->q_count + 1; /* there are keys: what has none is no tile in an update */
        item->q_first = item->k_count - item->q_count;
        item->q_set = item->k_set = (cpa_token_set){CPA_TOKENS_ALL, 0};
    }
    b->plan = (cpa_cuda_plan_builder){.given = &b->batch,
                                      .batch = &b->batch,
                                      .group = b->batch.shape.q_heads,
                                      .multiprocessors = cpa_test_random_below(2) ? 132 : 20,
                                      .tile_rows = TILE_ROWS,
                                      .decode_rows = CPA_CUDA_DECODE_ROWS,
                                      .team = cpa_cuda_team_of(&b->batch.shape, 64),
                                      .first_ready = b->batch.n_items,
                                      .in_order = b->in_order,
                                      .partial_rows = 77};
    CU_ASSERT_EQUAL_FATAL(cpa_cuda_plan_count_work(&b->plan, NULL), CPA_OK);
    cpa_cuda_plan_choose_splits(&b->plan);
    b->plan.tail_pieces = 0; /* an update cuts no last tiles */
    b->plan.partial_rows = 77;
    CU_ASSERT_FATAL(b->plan.n_pieces <= TILED_PIECES && b->plan.n_tiles <= TILED_SPLITS);
    cpa_cuda_prefill at = {.splits_at = (char *)b->splits - (char *)b->pieces};
    cpa_cuda_plan_write_prefill(&b->plan, (char *)b->pieces, &at);
}

/* Whether the piece is one of those of the plan that is set, which then is taken out. */
static int take_piece(tiled_batch *b, const cpa_cuda_piece *piece) {
    for (int64_t i = 0; i < b->plan.n_pieces; i++) {
        cpa_cuda_piece *other = &b->pieces[i];
        if (other->q_row != piece->q_row || other->row_begin != piece->row_begin || other->k_begin != piece->k_begin)
            continue;
        const int same = memcmp(other, piece, sizeof *piece) == 0;
        other->q_row = -1;
        return same;
    }
    return 0;
}

/* What one thread of an update makes of each piece, with the split that the plan has: how many differ from the plan's. */
static int64_t count_other_pieces(tiled_batch *b) {
    const int32_t decode_rows = (int32_t)b->plan.decode_rows;
    const cpa_cuda_update_args a = {.items = b->updated,
                                    .group = b->plan.group,
                                    .decode_rows = decode_rows,
                                    .tiles = {.rows = TILE_ROWS, .first_partial = 77}};
    const int64_t split = cpa_cuda_ceil_div(b->plan.split_keys, CPA_CUDA_PREFILL_KEYS);
    cpa_cuda_tile_count all = {0, 0, 0};
    int64_t wrong = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < b->batch.n_items; i++) {
        b->updated[i] = (cpa_cuda_item){.item = b->items[i]};
        if (!cpa_cuda_is_tiled(&a, &b->updated[i])) continue;
        b->tiled[n] = cpa_cuda_tiled_item_of(&a, i);
        const cpa_cuda_tile_count own = cpa_cuda_tile_count_of(&b->tiled[n], split);
        b->tiled[n++].before = all;
        all.pieces += own.pieces, all.partial_rows += own.partial_rows, all.splits += own.splits;
    }
    wrong += all.pieces != b->plan.n_pieces || all.splits != b->plan.n_splits;
    wrong += 77 + all.partial_rows != b->plan.partial_rows;
    for (int32_t p = 0; p < all.pieces; p++) {
        const cpa_cuda_tiled_item *item = &b->tiled[cpa_cuda_tiled_item_at(b->tiled, n, p)];
        const cpa_cuda_piece piece = cpa_cuda_tile_piece(&a, item, split, p - item->before.pieces);
        const int32_t cuts = cpa_cuda_cuts_of(item, split), of_item = p - item->before.pieces;
        wrong += !take_piece(b, &piece);
        if (cuts == 1 || of_item % cuts != 0) continue;
        const cpa_cuda_split of_tile = cpa_cuda_tile_split(&piece, cuts);
        wrong += memcmp(&of_tile, &b->splits[item->before.splits + of_item / cuts], sizeof of_tile) != 0;
    }
    return wrong;
}

static void an_update_has_the_tiles_of_a_plan_that_is_set(void) {
    tiled_batch *b = calloc(1, sizeof *b);
    int64_t wrong = 0, cut = 0, whole = 0;
    for (int trial = 0; trial < 100; trial++) {
        plan_tiles(b);
        cut += b->plan.n_splits > 0;
        whole += b->plan.n_splits == 0 && b->plan.n_pieces > 0;
        wrong += count_other_pieces(b);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(cut, >, 15);
    CPA_ASSERT_ORDER(whole, >, 15);
    free(b);
}

static const cpa_test tests[] = {
    {"decode units that fit are cut evenly", decode_units_that_fit_are_cut_evenly},
    {"many keys of TurboQuant are taken token by token", many_keys_of_turboquant_are_taken_token_by_token},
    {"a group that a CTA does not hold takes a team", a_group_that_a_cta_does_not_hold_takes_a_team},
    {"teams do not depend on the batch", teams_do_not_depend_on_the_batch},
    {"every row meets each key of its item once", every_row_meets_each_key_of_its_item_once},
    {"the search finds what single steps find", the_search_finds_what_single_steps_find},
    {"only tiles of prefill count", only_tiles_of_prefill_count},
    {"an update has the tiles of a plan that is set", an_update_has_the_tiles_of_a_plan_that_is_set},
};

CPA_TEST_MAIN("attend_split", tests)
