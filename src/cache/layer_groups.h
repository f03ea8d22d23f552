/* Layers in groups of one mask.
 *
 * The layers of a group have block tables and a pool of blocks of their own on each rank, so that those with a window
 * give back what they no longer see while others keep theirs. A block of a group is block_size tokens of one sequence
 * in each of its layers. The group that keeps most comes first and leads: its pool has as many blocks as the cache is
 * given, and another no more than the sequences that run at once can need. First tokens that are precise beside a quantised
 * cache are one more group, the last: what a window of one token and as many sinks would keep, of all layers. Pure logic. */
#ifndef CPA_LAYER_GROUPS_H
#define CPA_LAYER_GROUPS_H

#include <cpattn/model.h>
#include <cpattn/owner_map.h>
#include <cpattn/status.h>

#include "kernels/block_layout.h"

/* The layers of a model that has more masks than that are all in one group. */
enum { CPA_MAX_LAYER_GROUPS = 8 };

typedef struct cpa_layer_group {
    int32_t layers;
    int64_t window;      /* tokens that its layers see, the row's own included; 0: all */
    int64_t sinks;       /* the first tokens of a sequence, which stay visible behind a window */
    int is_precise;      /* not 0: of all layers, the first `sinks` tokens alone, in the model's dtype */
    int64_t block_bytes; /* bytes of a block in all layers of the group */
    int64_t num_blocks;  /* blocks of one rank */
    int64_t host_blocks; /* blocks of one rank in host memory, for swapping, and for those that are evicted */
    int64_t disk_blocks; /* blocks of one rank on disk, for those that are evicted */
} cpa_layer_group;

typedef struct cpa_layer_groups {
    int32_t count;
    cpa_layer_group list[CPA_MAX_LAYER_GROUPS]; /* sorted by window, the widest first, then by sinks, the most first;
                                                    what is precise comes last */
} cpa_layer_groups;

/* How many sequences a rank holds the windows of at once, and how many of their tokens a step computes. */
typedef struct cpa_layer_groups_load {
    cpa_owner_map map;
    int32_t block_size;
    int32_t sequences;
    int64_t step_tokens;
} cpa_layer_groups_load;

/* The keys of a model's indexer. */
cpa_index_rows cpa_layer_groups_index(const cpa_model_shape *model);
/* Bytes of a block of tokens in all layers of a model. */
int64_t cpa_layer_groups_block_bytes(const cpa_model_shape *model, int32_t block_size);
/* The groups of a model; their pools have no blocks yet. */
void cpa_layer_groups_of(const cpa_model_shape *model, int32_t block_size, cpa_layer_groups *out);
/* Adds the group of so many first tokens that are precise, if any; there is room for one more. */
void cpa_layer_groups_add_precise(cpa_layer_groups *groups, const cpa_model_shape *model, int32_t block_size,
                                  int64_t tokens);
/* The group of the first tokens that are precise; -1: none are. */
static inline int32_t cpa_layer_groups_precise(const cpa_layer_groups *groups) {
    return groups->list[groups->count - 1].is_precise ? groups->count - 1 : -1;
}
static inline int64_t cpa_layer_groups_precise_tokens(const cpa_layer_groups *groups) {
    const int32_t precise = cpa_layer_groups_precise(groups);
    return precise < 0 ? 0 : groups->list[precise].sinks;
}
/* Whether a group has the key of a token: what is precise, those of first tokens alone. */
static inline int cpa_layer_group_keeps(const cpa_layer_group *group, int64_t position) {
    return !group->is_precise || position < group->sinks;
}
/* The group of a layer with that mask. */
int32_t cpa_layer_groups_find(const cpa_layer_groups *groups, const cpa_mask *mask);

/* Gives the pool of the first group num_blocks blocks, and each other what a load can need, at most as many. */
void cpa_layer_groups_size(cpa_layer_groups *groups, const cpa_layer_groups_load *load, int64_t num_blocks);
/* Deals so many bytes of host memory, or on disk, to the groups, by the bytes of their pools. */
void cpa_layer_groups_size_host(cpa_layer_groups *groups, int64_t bytes);
void cpa_layer_groups_size_disk(cpa_layer_groups *groups, int64_t bytes);
/* Bytes of all pools of a rank, host memory not counted. */
int64_t cpa_layer_groups_bytes(const cpa_layer_groups *groups);

/* The most blocks that a group holds on one rank of a sequence of that length, while no more than `chunk` tokens of it
 * are computed in a step. */
int64_t cpa_layer_group_most(const cpa_layer_group *group, cpa_owner_map map, int32_t block_size,
                             cpa_placement_kind kind, int64_t chunk, int64_t tokens);

#endif
