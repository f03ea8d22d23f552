/* The transfers of pass-KV: which tokens go into a segment, who exchanges it, and where in staging it lies.
 *
 * Staging holds two segments to send, then two to receive for each region: one transfer is packed and one arrives while
 * one is attended. A planner opens a transfer, adds its ranges and routes, places it and adds it; a layer packs, starts
 * and finishes the transfers of its schedule in their order, one in flight.
 *
 * Where a layer wants some blocks of a message alone (kv_wanted.h), these are packed and sent one behind the other, and
 * moved to their places when they have arrived (kv_squeeze.h): what is attended does not change. */
#ifndef CPA_KV_TRANSFERS_H
#define CPA_KV_TRANSFERS_H

#include "kernels/block_layout.h"
#include "src/context/kv_wanted.h"
#include "src/context/row_plan.h"

enum { CPA_KV_BUFFERS = 2 }; /* segments to send, and segments to receive for each region */

/* What a transfer sends to and receives from one peer, in blocks of staging. */
typedef struct cpa_kv_route {
    int32_t peer;
    int32_t region; /* region of the own staging that blocks of the peer are received in */
    int64_t send_blocks, recv_blocks;
    int64_t coming; /* of recv_blocks, those that come in the layer at hand */
} cpa_kv_route;

/* Where the keys of a rank lie that a transfer brings of a chunk. */
typedef struct cpa_kv_stretch {
    int32_t rank;
    int64_t chunk;
    int64_t first, count; /* local tokens of the rank */
    int64_t block;        /* of the segment, which receives the first one */
} cpa_kv_stretch;

/* What this rank attends of a transfer, for its rows of one form. */
typedef struct cpa_kv_attended {
    cpa_row_plan *plan;
    int64_t rows;      /* rows that attend the region; 0: none */
    int64_t first_row; /* all peers at once: the first of those rows */
} cpa_kv_attended;

/* One exchange of keys and values. */
typedef struct cpa_kv_transfer {
    int64_t index;           /* number of the transfer in its step */
    int32_t round;           /* peer by peer; 0: all peers at once */
    int64_t range, n_ranges; /* ranges that are packed: the first, and how many */
    /* Block pairs to send: the first, and room for send_blocks of them, filled when the first layer packs. */
    int64_t pair, n_pairs;
    int64_t route;
    int32_t n_routes;
    int32_t send_buffer;              /* half of the send staging that the transfer uses */
    int packs;                        /* 0: nothing is sent, or the send staging has it already */
    int64_t send_blocks, recv_blocks; /* blocks in use of the send and receive staging */
    int64_t going;                    /* of send_blocks, those that go in the layer at hand */
    int64_t stretch, n_stretches;     /* of all ranks */
    int begins, ends; /* peer by peer: whether it is the first, the last that the peer sends; 0: nothing is attended */
    cpa_kv_attended attended[CPA_MOST_ROW_FORMS];
} cpa_kv_transfer;

/* Layers by what they stage: the cache of the context's shape, or one that is not quantised. */
typedef enum cpa_kv_staged { CPA_KV_OF_SHAPE = 0, CPA_KV_UNQUANTISED, CPA_KV_STAGED } cpa_kv_staged;

/* How staging is divided, in segments of `capacity` blocks. */
typedef struct cpa_kv_staging {
    int32_t regions;            /* to receive in, of each of two buffers: one, or one for each peer */
    int64_t segments, capacity; /* all segments; blocks of one */
    /* Layouts of a block of staging, of a layer by what it stages; rows in one piece, whatever the layout of the cache:
     * all ranks agree. */
    cpa_block_layout layouts[CPA_KV_STAGED];
    int64_t block_bytes; /* of the longest */
} cpa_kv_staging;

typedef struct cpa_kv_transfers {
    cpa_context_ops *ops;
    cpa_kv_staging staging;
    const cpa_block_layout *layout; /* of the layer at hand: one of staging.layouts */
    char *memory;
    int32_t *region_of;   /* [cp_size] region of each peer */
    int64_t bytes_in_use; /* bytes of staging, in the layer at hand, and of the workspace */
    cpa_kv_transfer *list;
    int64_t count, capacity;
    cpa_row_plan **plans; /* kept from step to step */
    int64_t n_plans, plans_capacity, plans_in_use;
    cpa_kv_range *ranges;
    int64_t n_ranges, ranges_capacity;
    int64_t (*pairs)[2]; /* blocks of the cache and of staging */
    int64_t n_pairs, pairs_capacity;
    cpa_kv_route *routes;
    int64_t n_routes, routes_capacity;
    cpa_kv_stretch *stretches;
    int64_t n_stretches, stretches_capacity;
    const cpa_kv_wanted *wanted; /* by the layer at hand; NULL: all keys */
    struct {                     /* scratch of kv_squeeze.c */
        int64_t *places;
        cpa_kv_range *ranges;
        int64_t (*pairs)[2];
        int64_t places_capacity, ranges_capacity, pairs_capacity;
    } squeeze;
    cpa_context_exchange exchange; /* the transfer in flight */
} cpa_kv_transfers;

cpa_status cpa_kv_transfers_create(cpa_kv_transfers *t, cpa_context_ops *ops, const cpa_kv_staging *staging);
void cpa_kv_transfers_destroy(cpa_kv_transfers *t);

/* ---- planning ---- */

/* Forgets the transfers of the last step. */
void cpa_kv_transfers_clear(cpa_kv_transfers *t);
/* A plan for this step; the transfers keep it. */
cpa_status cpa_kv_transfers_take_plan(cpa_kv_transfers *t, cpa_row_plan **out);
/* An empty transfer behind those that were added. */
cpa_kv_transfer cpa_kv_transfers_open(const cpa_kv_transfers *t, int32_t round);
cpa_status cpa_kv_transfers_add_range(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_range range);
cpa_status cpa_kv_transfers_add_route(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_route route);
cpa_status cpa_kv_transfers_add_stretch(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_stretch stretch);
/* Sums up the routes, and finds the send staging for the ranges. `since`: the first transfer of its schedule.
 * `own_blocks`: blocks of own keys that are attended in staging, whoever receives them. */
void cpa_kv_transfers_place(const cpa_kv_transfers *t, cpa_kv_transfer *open, int64_t since, int64_t own_blocks);
cpa_status cpa_kv_transfers_add(cpa_kv_transfers *t, const cpa_kv_transfer *placed);

/* The first block of staging that a placed transfer sends from, and that an open one receives in. Regions of even
 * transfers lie before those of odd ones. */
int64_t cpa_kv_transfers_send_block(const cpa_kv_transfers *t, const cpa_kv_transfer *transfer);
int64_t cpa_kv_transfers_recv_block(const cpa_kv_transfers *t, const cpa_kv_transfer *transfer, int32_t region);

/* ---- one layer ---- */

/* All of staging as a cache. */
cpa_kv_view cpa_kv_transfers_view(const cpa_kv_transfers *t);
/* `wanted`: of the layer; NULL: all keys are. */
void cpa_kv_transfers_begin(cpa_kv_transfers *t, const cpa_kv_view *cache, const cpa_kv_wanted *wanted);
/* Packs what a transfer sends of a layer's cache. */
cpa_status cpa_kv_transfers_pack(cpa_kv_transfers *t, int64_t index, const cpa_kv_view *cache,
                                 const int32_t *block_tables, cpa_stream *stream);
cpa_status cpa_kv_transfers_start(cpa_kv_transfers *t, int64_t index, cpa_stream *stream);
/* Work on the stream from here on sees what the transfer in flight brought. */
cpa_status cpa_kv_transfers_finish(cpa_kv_transfers *t, int64_t index, cpa_stream *stream);
/* A transfer is attended: its staging is free. */
void cpa_kv_transfers_release(cpa_kv_transfers *t, int64_t index);

#endif
