/* Layers in groups of one mask, and how many blocks the pool of each has. */
#include "src/cache/layer_groups.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 16, LAYERS = 12 };

static const cpa_attention_shape shape = {.q_heads = 2, .kv_heads = 1, .k_dim = 8, .v_dim = 8};

static cpa_mask window_of(int64_t window, int32_t sinks) {
    return (cpa_mask){.causal = 1, .window = window, .sinks = sinks};
}

static cpa_layer_groups groups_of(const cpa_mask *masks, int32_t layers) {
    const cpa_model_shape model = {.layers = layers, .attention = shape, .layer_masks = masks};
    cpa_layer_groups groups;
    cpa_layer_groups_of(&model, BLOCK, &groups);
    return groups;
}

static void layers_of_one_mask_are_a_group_the_widest_first(void) {
    const cpa_mask masks[] = {window_of(64, 0), window_of(0, 0), window_of(64, 4),           window_of(128, 0),
                              window_of(64, 0), window_of(0, 9), {.causal = 0, .window = 32}};
    const cpa_layer_groups groups = groups_of(masks, 7);
    static const cpa_layer_group expected[] = {{.layers = 3},
                                               {.layers = 1, .window = 128},
                                               {.layers = 1, .window = 64, .sinks = 4},
                                               {.layers = 2, .window = 64}};
    static const int32_t of_layer[] = {3, 0, 2, 1, 3, 0, 0};
    CU_ASSERT_EQUAL_FATAL(groups.count, 4);
    for (int32_t g = 0; g < 4; g++) {
        CU_ASSERT_EQUAL(groups.list[g].layers, expected[g].layers);
        CU_ASSERT_EQUAL(groups.list[g].window, expected[g].window);
        CU_ASSERT_EQUAL(groups.list[g].sinks, expected[g].sinks);
        CU_ASSERT_EQUAL(groups.list[g].block_bytes, groups.list[g].layers * BLOCK * 2 * 8 * 4);
    }
    for (int32_t layer = 0; layer < 7; layer++)
        CU_ASSERT_EQUAL(cpa_layer_groups_find(&groups, &masks[layer]), of_layer[layer]);
}

static void layers_of_one_mask_alone_are_one_group(void) {
    const cpa_model_shape model = {
        .layers = LAYERS, .attention = shape, .mask = {.causal = 1, .window = 50, .sinks = 3}};
    cpa_layer_groups groups;
    cpa_layer_groups_of(&model, BLOCK, &groups);
    CU_ASSERT_EQUAL(groups.count, 1);
    CU_ASSERT_EQUAL(groups.list[0].layers, LAYERS);
    CU_ASSERT_EQUAL(groups.list[0].window, 50);
    CU_ASSERT_EQUAL(groups.list[0].sinks, 3);
}

static void more_masks_than_groups_share_one_that_keeps_what_any_of_them_sees(void) {
    cpa_mask masks[LAYERS];
    for (int32_t layer = 0; layer < LAYERS; layer++) masks[layer] = window_of(10 + layer, 20 - layer);
    const cpa_layer_groups groups = groups_of(masks, LAYERS);
    CU_ASSERT_EQUAL(groups.count, 1);
    CU_ASSERT_EQUAL(groups.list[0].layers, LAYERS);
    CU_ASSERT_EQUAL(groups.list[0].window, 10 + LAYERS - 1);
    CU_ASSERT_EQUAL(groups.list[0].sinks, 20);
    CU_ASSERT_EQUAL(cpa_layer_groups_find(&groups, &masks[5]), 0);
    CU_ASSERT_EQUAL(groups_of(masks, CPA_MAX_LAYER_GROUPS).count, CPA_MAX_LAYER_GROUPS);
}

/* Blocks in use of every rank, one token after the other, counted plainly. */
static void a_sequence_never_needs_more_than_the_most(void) {
    enum { TOKENS = 300 };
    for (int32_t ranks = 1; ranks <= 3; ranks++)
        for (int32_t interleave = 4; interleave <= 32; interleave *= 2)
            for (int64_t window = 1; window < 120; window += 17)
                for (int64_t chunk = 1; chunk <= 65; chunk += 16) {
                    const cpa_owner_map map = {ranks, interleave};
                    const cpa_layer_group group = {.window = window, .sinks = 5};
                    const int64_t most = cpa_layer_group_most(&group, map, BLOCK, CPA_SHARDED, chunk, TOKENS);
                    int64_t found = 0;
                    for (int64_t start = 0; start + chunk <= TOKENS; start++) {
                        const int64_t oldest = start - window + 1 > 0 ? start - window + 1 : 0;
                        const int64_t end = (cpa_shard_len(map, 0, start + chunk) + BLOCK - 1) / BLOCK;
                        const int64_t first = cpa_shard_len(map, 0, oldest) / BLOCK;
                        const int64_t sinks = (cpa_shard_len(map, 0, 5) + BLOCK - 1) / BLOCK;
                        const int64_t held = end - first + (sinks < first ? sinks : first);
                        if (held > found) found = held;
                    }
                    CU_ASSERT_FATAL(found <= most);
                    CU_ASSERT_FATAL(most <= (cpa_shard_len(map, 0, TOKENS) + BLOCK - 1) / BLOCK);
                    CU_ASSERT_FATAL(most <= found + 2 + ranks * BLOCK / interleave);
                }
}

static void narrow_groups_get_what_the_load_needs_and_no_more_than_the_first(void) {
    cpa_mask masks[LAYERS];
    for (int32_t layer = 0; layer < LAYERS; layer++) masks[layer] = window_of(layer % 6 == 5 ? 0 : 1024, 0);
    cpa_layer_groups groups = groups_of(masks, LAYERS);
    cpa_layer_groups_load load = {{1, BLOCK}, BLOCK, 1, 512};
    CU_ASSERT_EQUAL_FATAL(groups.count, 2);
    CU_ASSERT_EQUAL(groups.list[1].layers, 10);
    cpa_layer_groups_size(&groups, &load, 8192);
    CU_ASSERT_EQUAL(groups.list[0].num_blocks, 8192);
    CU_ASSERT(groups.list[1].num_blocks >= (1024 + 512) / BLOCK && groups.list[1].num_blocks < 110);
    const int64_t all = 8192 * (groups.list[0].block_bytes + groups.list[1].block_bytes);
    CU_ASSERT((double)cpa_layer_groups_bytes(&groups) < 0.18 * (double)all);
    load.sequences = 1000;
    cpa_layer_groups_size(&groups, &load, 8192);
    CU_ASSERT_EQUAL(groups.list[1].num_blocks, 8192);
    cpa_layer_groups_size_host(&groups, all / 2);
    int64_t host = 0;
    for (int32_t g = 0; g < 2; g++) host += groups.list[g].host_blocks * groups.list[g].block_bytes;
    CU_ASSERT(host <= all / 2 && host > all / 2 - 2 * groups.list[1].block_bytes);
    cpa_layer_groups_size_disk(&groups, 3 * all);
    for (int32_t g = 0; g < 2; g++) CPA_ASSERT_ORDER(groups.list[g].disk_blocks, >=, 6 * groups.list[g].host_blocks);
    const cpa_mask wide = window_of((int64_t)1 << 40, 0);
    masks[0] = wide;
    groups = groups_of(masks, LAYERS);
    load.sequences = INT32_MAX;
    cpa_layer_groups_size(&groups, &load, 100);
    CU_ASSERT_EQUAL(groups.list[1].num_blocks, 100);
    CU_ASSERT_EQUAL(groups.list[2].num_blocks, 100);
}

/* The last group is of all layers, though one of them has the same window and sinks. */
static void precise_tokens_are_a_group_that_no_layer_is_found_in(void) {
    enum { TOKENS = 2 * BLOCK };
    const cpa_mask masks[] = {window_of(0, 0), window_of(1, TOKENS)};
    const cpa_attention_shape codes = {
        .q_heads = 2, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .dtype = CPA_BF16, .kv_dtype = CPA_INT8};
    const cpa_model_shape model = {.layers = 2, .attention = codes, .layer_masks = masks};
    cpa_layer_groups groups;
    cpa_layer_groups_of(&model, BLOCK, &groups);
    cpa_layer_groups_add_precise(&groups, &model, BLOCK, 0);
    CU_ASSERT_EQUAL(groups.count, 2);
    CU_ASSERT_EQUAL(cpa_layer_groups_precise(&groups), -1);
    CU_ASSERT_EQUAL(cpa_layer_groups_precise_tokens(&groups), 0);
    cpa_layer_groups_add_precise(&groups, &model, BLOCK, TOKENS);
    CU_ASSERT_EQUAL_FATAL(groups.count, 3);
    CU_ASSERT_EQUAL(cpa_layer_groups_precise(&groups), 2);
    CU_ASSERT_EQUAL(cpa_layer_groups_precise_tokens(&groups), TOKENS);
    CU_ASSERT_EQUAL(groups.list[2].layers, 2);
    CU_ASSERT_EQUAL(groups.list[2].block_bytes, 2 * BLOCK * 2 * 8 * 2);
    for (int32_t layer = 0; layer < 2; layer++) CU_ASSERT_EQUAL(cpa_layer_groups_find(&groups, &masks[layer]), layer);
}

static const cpa_test tests[] = {
    {"layers of one mask are a group, the widest first", layers_of_one_mask_are_a_group_the_widest_first},
    {"layers of one mask alone are one group", layers_of_one_mask_alone_are_one_group},
    {"more masks than groups share one that keeps what any of them sees",
     more_masks_than_groups_share_one_that_keeps_what_any_of_them_sees},
    {"a sequence never needs more than the most", a_sequence_never_needs_more_than_the_most},
    {"narrow groups get what the load needs, and no more than the first",
     narrow_groups_get_what_the_load_needs_and_no_more_than_the_first},
    {"precise tokens are a group that no layer is found in", precise_tokens_are_a_group_that_no_layer_is_found_in},
};

CPA_TEST_MAIN("layer groups", tests)
