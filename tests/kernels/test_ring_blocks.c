/* Attention by selected blocks of keys whose cache lies on the host: only blocks that somebody selected are read, which
 * is counted; the others are poison there. On the host with the bits of keys on the device. */
#include <stdlib.h>
#include <string.h>

#include "src/check/cases/selection.h"
#include "src/ops/kv_piece.h"
#include "tests/fixtures/ring_fixture.h"
#include "tests/fixtures/unit.h"

enum { LENGTH = 5001, MASK_BLOCK = 128 };

static int is_set(const cpa_case_score *score, int64_t word, int32_t head, int64_t block) {
    const uint32_t *bits = score->blocks + word + head * cpa_mask_words(score->n_blocks);
    return bits[block / 32] >> (block % 32) & 1;
}

/* About one block in `of` for each head and 64 rows, of a few columns that heads have in common. All rows select. */
static cpa_case_score select_blocks(const cpa_attend_fixture *f, int32_t block, uint32_t of) {
    cpa_case_score score = {.q_heads = f->shape.q_heads, .rows = f->rows};
    if (cpa_case_score_add_blocks(&score, block, f->shape.length, NULL) != CPA_OK) abort();
    const int64_t words = cpa_mask_words(score.n_blocks);
    for (int64_t row = 0; row < score.rows; row++) score.block_word[row] = row / 64 * score.q_heads * words;
    for (int64_t i = 0; i < score.n_block_words; i++)
        for (uint32_t bit = 0; bit < 32; bit++) {
            const uint32_t column = (uint32_t)(i % words) * 32 + bit;
            if ((column * 2654435761u >> 16) % of != 0 || column >= (uint32_t)score.n_blocks)
                score.blocks[i] &= ~(1u << bit);
        }
    return score;
}

/* Whether some row attends a key of a block of the cache, the `entry`-th of a slot. */
static int attends(const cpa_attend_fixture *f, const cpa_case_score *score, int32_t slot, int64_t entry) {
    const int64_t size = f->shape.block_size, run = f->shape.interleave, ranks = f->shape.cp_size;
    for (int64_t key = entry * size; key < (entry + 1) * size && key < f->k_tokens[slot]; key++) {
        const int64_t index = ranks == 1 ? key : (key / run * ranks + slot) * run + key % run;
        for (int64_t row = 0; row < score->rows; row++) {
            if (score->block_word[row] < 0) return 1;
            if (index / score->block >= score->n_blocks) continue;
            for (int32_t head = 0; head < score->q_heads; head++)
                if (is_set(score, score->block_word[row], head, index / score->block)) return 1;
        }
    }
    return 0;
}

/* Poison in what nobody attends; the bytes of the other blocks. */
static int64_t poison_others(cpa_ring_site *s, const cpa_case_score *score, int32_t slot) {
    const cpa_kv_view kv = cpa_kv_view_resolve(s->f.host_kv);
    int64_t bytes = 0;
    for (int64_t entry = 0; entry * kv.block_size < s->f.k_tokens[slot]; entry++) {
        const int32_t block = s->f.tables[s->f.table[slot] + entry];
        const int attended = attends(&s->f, score, slot, entry);
        for (int part = CPA_KEYS; part < cpa_kv_parts(&kv); part++) {
            const cpa_kv_pool pool = cpa_kv_pool_of(&kv, (cpa_kv_part)part);
            const int64_t piece = cpa_kv_piece_bytes(&kv, (cpa_kv_part)part);
            if (attended)
                bytes += piece;
            else
                memset(pool.memory + block * pool.block_stride, 0xff, (size_t)piece);
        }
    }
    return bytes;
}

/* All slots of a case; returns the share of the cache that was read. */
static double check_case(const cpa_attend_case *shape, cpa_case_score (*select)(const cpa_attend_fixture *f),
                         int32_t segments, int64_t least) {
    cpa_ring_site s;
    int64_t bytes = 0, all = 0;
    cpa_ring_site_open(&s, shape, segments, least);
    cpa_case_score score = select(&s.f);
    s.f.score = &score;
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        bytes += poison_others(&s, &score, slot);
        all += (s.f.k_tokens[slot] + shape->block_size - 1) / shape->block_size * s.ring->layout.bytes;
        cpa_ring_site_check(&s.f, slot, 0, 3);
        CPA_ASSERT_ORDER(cpa_ring_site_stats(&s).bytes_read, ==, bytes);
    }
    cpa_case_score_release(&score);
    cpa_ring_site_close(&s);
    return (double)bytes / (double)all;
}

/* So many tokens of a base, of which the last `rows` are queries. */
static cpa_attend_case of_base(int base, int64_t rows) {
    cpa_attend_case shape = CPA_ATTEND_BASE[base];
    shape.length = LENGTH;
    shape.start = LENGTH - rows;
    shape.mask = (cpa_mask){.causal = 1};
    return shape;
}

static cpa_case_score select_few(const cpa_attend_fixture *f) {
    return select_blocks(f, MASK_BLOCK, 4);
}
static cpa_case_score select_small_blocks(const cpa_attend_fixture *f) {
    return select_blocks(f, 32, 5);
}
static cpa_case_score select_in_other_order(const cpa_attend_fixture *f) {
    cpa_case_score score = select_few(f);
    score.row_map = malloc((size_t)score.rows * sizeof *score.row_map);
    if (!score.row_map) abort();
    for (int64_t row = 0; row < score.rows; row++) score.row_map[row] = (int32_t)(score.rows - 1 - row);
    return score;
}
static cpa_case_score select_but_for_a_row(const cpa_attend_fixture *f) {
    cpa_case_score score = select_few(f);
    score.block_word[score.rows - 3] = -1;
    return score;
}

static void blocks_that_nobody_selected_are_not_read(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++)
        for (int32_t segments = 2; segments <= 3; segments++) {
            cpa_attend_case shape = of_base(base, 300);
            shape.block_size = 16 << (base % 3);
            shape.head_major = segments == 3;
            CU_ASSERT(check_case(&shape, select_few, segments, 1) < 0.5);
            CU_ASSERT(check_case(&shape, select_small_blocks, segments, 2) < 0.6);
        }
}

static void nor_are_they_of_shards(void) {
    for (int32_t ranks = 2; ranks <= 3; ranks++) {
        cpa_attend_case shape = of_base(1, 70 * ranks);
        shape.cp_size = ranks;
        shape.length *= ranks, shape.start = shape.length - 70 * ranks;
        shape.interleave = MASK_BLOCK;
        check_case(&shape, select_few, 3, 1);
        check_case(&shape, select_in_other_order, 2, 1);
        shape.interleave = 4; /* runs shorter than blocks */
        check_case(&shape, select_few, 2, 1);
    }
}

static void a_row_that_attends_all_keys_has_all_read(void) {
    const cpa_attend_case shape = of_base(0, 200);
    CU_ASSERT_EQUAL(check_case(&shape, select_but_for_a_row, 2, 1), 1.0);
}

static const cpa_test tests[] = {
    {"blocks that nobody selected are not read", blocks_that_nobody_selected_are_not_read},
    {"nor are they of shards", nor_are_they_of_shards},
    {"a row that attends all keys has all read", a_row_that_attends_all_keys_has_all_read},
};
CPA_DEVICE_TEST_MAIN("ring_blocks", tests)
