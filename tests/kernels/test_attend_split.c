/* Where the CUDA plan cuts: how decode units are dealt to CTAs, and the search for the cut of prefill tiles against one
 * step after the other. Needs no device. */
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_split.h"
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
    CU_ASSERT(searched > BATCHES / 4);
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
    return cpa_cuda_share_decode(&batch, 132, wide_fits);
}

static cpa_cuda_decode_shares shares_of(int64_t units, int64_t keys, cpa_dtype kv_dtype) {
    return shares_on(1, 64, units, keys, kv_dtype);
}

static void decode_units_that_fit_are_cut_evenly(void) {
    const cpa_cuda_decode_shares one = shares_of(1, 16384, CPA_BF16), few = shares_of(16, 1024, CPA_BF16);
    CU_ASSERT(one.apart && one.wide && one.ctas == 16 && one.longest == 256 / 16);
    CU_ASSERT(few.apart && few.wide && few.longest == 16);                      /* a CTA each */
    const cpa_cuda_decode_shares narrow = shares_on(0, 64, 1, 16384, CPA_BF16); /* a device of 8.x */
    CU_ASSERT(narrow.apart && !narrow.wide && narrow.ctas == 33 && narrow.longest == 8);
    const cpa_cuda_decode_shares uneven = shares_of(10, 2048, CPA_BF16);
    CU_ASSERT(uneven.apart && !uneven.wide && uneven.ctas == 33 && uneven.longest == 11); /* 3 CTAs of 11, 11, 10 */
    const cpa_cuda_decode_shares many = shares_of(128, 1024, CPA_BF16);
    CU_ASSERT(!many.apart && !many.wide && many.ctas == 33);
    CU_ASSERT_EQUAL(many.cap, (128 * (16 + CPA_CUDA_DECODE_OVERHEAD) + 32) / 33 + CPA_CUDA_DECODE_OVERHEAD);
    const cpa_cuda_decode_shares codes = shares_of(1, 1024, CPA_INT8); /* two heads a CTA */
    CU_ASSERT(codes.apart && !codes.wide && codes.ctas == 66 && codes.longest == 1);
    CU_ASSERT_EQUAL(cpa_cuda_decode_pieces(0, codes.cap), 1);
    CU_ASSERT_EQUAL(cpa_cuda_decode_pieces(11, CPA_CUDA_DECODE_OVERHEAD + 5), 3);
}

static const cpa_test tests[] = {
    {"decode units that fit are cut evenly", decode_units_that_fit_are_cut_evenly},
    {"the search finds what single steps find", the_search_finds_what_single_steps_find},
    {"only tiles of prefill count", only_tiles_of_prefill_count},
};

CPA_TEST_MAIN("attend_split", tests)
