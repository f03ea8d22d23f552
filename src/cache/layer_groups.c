#include "src/cache/layer_groups.h"

#include "base/min_max.h"
#include "src/cache/kv_cache.h"

/* ---- which layers ---- */

/* What a layer with that mask keeps. */
static cpa_layer_group kept_by(const cpa_mask *mask) {
    const int64_t window = mask->causal ? mask->window : 0;
    return (cpa_layer_group){.window = window, .sinks = window > 0 ? mask->sinks : 0};
}

static int is_wider(const cpa_layer_group *a, const cpa_layer_group *b) {
    if (a->window != b->window) return a->window == 0 || (b->window > 0 && a->window > b->window);
    return a->sinks > b->sinks;
}

/* The widest of what layers keep, among what is narrower than a group (NULL: of all); 0: there is none. */
static int find_widest(const cpa_model_shape *model, const cpa_layer_group *group, cpa_layer_group *out) {
    int found = 0;
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_mask mask = cpa_model_mask(model, layer);
        const cpa_layer_group kept = kept_by(&mask);
        if (group && !is_wider(group, &kept)) continue;
        if (!found || is_wider(&kept, out)) *out = kept;
        found = 1;
    }
    return found;
}

/* One group that keeps what any layer sees. */
static void join_all(const cpa_model_shape *model, cpa_layer_groups *groups) {
    groups->count = 1;
    for (int32_t layer = 0; layer < model->layers && groups->list[0].window > 0; layer++)
        groups->list[0].sinks = cpa_max64(groups->list[0].sinks, cpa_model_mask(model, layer).sinks);
}

cpa_index_rows cpa_layer_groups_index(const cpa_model_shape *model) {
    return model->index ? (cpa_index_rows){model->index->dim, model->index->dtype} : (cpa_index_rows){.dim = 0};
}

static int64_t layer_block_bytes(const cpa_model_shape *model, int32_t layer, int32_t block_size) {
    const cpa_attention_shape shape = cpa_model_layer_shape(model, layer);
    return cpa_kv_cache_block_bytes(&shape, cpa_layer_groups_index(model), 1, block_size);
}

int64_t cpa_layer_groups_block_bytes(const cpa_model_shape *model, int32_t block_size) {
    int64_t bytes = 0;
    for (int32_t layer = 0; layer < model->layers; layer++) bytes += layer_block_bytes(model, layer, block_size);
    return bytes;
}

void cpa_layer_groups_of(const cpa_model_shape *model, int32_t block_size, cpa_layer_groups *out) {
    cpa_layer_group group, *last = NULL;
    *out = (cpa_layer_groups){.count = 0};
    while (find_widest(model, last, &group)) {
        if (out->count == CPA_MAX_LAYER_GROUPS) {
            join_all(model, out);
            break;
        }
        last = &out->list[out->count++];
        *last = group;
    }
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_mask mask = cpa_model_mask(model, layer);
        cpa_layer_group *of = &out->list[cpa_layer_groups_find(out, &mask)];
        of->layers++;
        of->block_bytes += layer_block_bytes(model, layer, block_size);
    }
}

void cpa_layer_groups_add_precise(cpa_layer_groups *groups, const cpa_model_shape *model, int32_t block_size,
                                  int64_t tokens) {
    const cpa_attention_shape shape = cpa_shape_unquantised(&model->attention);
    if (tokens == 0 || groups->count == CPA_MAX_LAYER_GROUPS) return;
    groups->list[groups->count++] = (cpa_layer_group){
        .layers = model->layers,
        .window = 1,
        .sinks = tokens,
        .is_precise = 1,
        .block_bytes = cpa_kv_cache_block_bytes(&shape, (cpa_index_rows){.dim = 0}, model->layers, block_size)};
}

int32_t cpa_layer_groups_find(const cpa_layer_groups *groups, const cpa_mask *mask) {
    const cpa_layer_group kept = kept_by(mask);
    int32_t g = groups->count - 1 - (cpa_layer_groups_precise(groups) >= 0);
    while (g > 0 && (groups->list[g].window != kept.window || groups->list[g].sinks != kept.sinks)) g--;
    return g;
}

/* ---- how many blocks ---- */

static int64_t blocks_for(int64_t tokens, int32_t block_size) {
    return (tokens + block_size - 1) / block_size;
}

/* Tokens that a rank has at most of so many that follow each other. */
static int64_t most_tokens(cpa_owner_map map, cpa_placement_kind kind, int64_t tokens) {
    if (kind == CPA_ON_RANK) return tokens;
    return cpa_min64(tokens, (tokens / ((int64_t)map.interleave * map.cp_size) + 1) * map.interleave);
}

int64_t cpa_layer_group_most(const cpa_layer_group *group, cpa_owner_map map, int32_t block_size,
                             cpa_placement_kind kind, int64_t chunk, int64_t tokens) {
    const int on_rank = kind == CPA_ON_RANK;
    const int64_t all = blocks_for(on_rank ? tokens : cpa_shard_len(map, 0, tokens), block_size);
    if (group->window == 0 || chunk >= tokens || group->window >= tokens) return all;
    const int64_t sinks = blocks_for(on_rank ? group->sinks : cpa_shard_len(map, 0, group->sinks), block_size);
    /* Those of the chunk, those that its first row sees, and those before that one in what is shared at once, a block of
     * every rank where runs are shorter than blocks; they may begin and end within a block. */
    const int64_t shared = (int64_t)block_size * (map.interleave < block_size && !on_rank ? map.cp_size : 1);
    const int64_t seen = most_tokens(map, kind, group->window - 1 + chunk + shared - 1);
    return cpa_min64(all, sinks + blocks_for(seen - 1, block_size) + 1);
}

/* What all sequences of a load need while their tokens are those of one step. */
static int64_t most_of_load(const cpa_layer_group *group, const cpa_layer_groups_load *load) {
    const int64_t each = cpa_layer_group_most(group, load->map, load->block_size, CPA_SHARDED, 1, INT64_MAX / 4);
    const int64_t step = most_tokens(load->map, CPA_SHARDED, load->step_tokens);
    const int64_t alone =
        cpa_layer_group_most(group, load->map, load->block_size, CPA_ON_RANK, load->step_tokens, INT64_MAX / 4);
    const int64_t running = load->sequences * cpa_min64(each, INT32_MAX);
    return cpa_max64(running + blocks_for(step, load->block_size), alone);
}

void cpa_layer_groups_size(cpa_layer_groups *groups, const cpa_layer_groups_load *load, int64_t num_blocks) {
    groups->list[0].num_blocks = num_blocks;
    for (int32_t g = 1; g < groups->count; g++)
        groups->list[g].num_blocks = cpa_min64(most_of_load(&groups->list[g], load), num_blocks);
}

int64_t cpa_layer_groups_bytes(const cpa_layer_groups *groups) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < groups->count; g++) bytes += groups->list[g].num_blocks * groups->list[g].block_bytes;
    return bytes;
}

/* Blocks of a group among so many bytes of all groups. */
static int64_t blocks_of_share(const cpa_layer_groups *groups, int32_t group, int64_t bytes) {
    const cpa_layer_group *g = &groups->list[group];
    const double share = (double)(g->num_blocks * g->block_bytes) / (double)cpa_layer_groups_bytes(groups);
    const int64_t own = groups->count == 1 ? bytes : (int64_t)(share * (double)bytes);
    return cpa_min64(own / g->block_bytes, INT32_MAX);
}

void cpa_layer_groups_size_host(cpa_layer_groups *groups, int64_t bytes) {
    for (int32_t g = 0; g < groups->count; g++) groups->list[g].host_blocks = blocks_of_share(groups, g, bytes);
}

void cpa_layer_groups_size_disk(cpa_layer_groups *groups, int64_t bytes) {
    for (int32_t g = 0; g < groups->count; g++) groups->list[g].disk_blocks = blocks_of_share(groups, g, bytes);
}
