/* What the files of pass-KV share.
 *
 *   pass_kv.c         staging, and the transfers of a layer
 *   pass_kv_rounds.c  planning, peer by peer
 *   pass_kv_gather.c  planning, all peers at once
 *
 * A planner opens a transfer, adds its spans and routes, and closes it. */
#ifndef CPA_PASS_KV_H
#define CPA_PASS_KV_H

#include "src/context/context_internal.h"

/* A plan for this step. */
cpa_status cpa_pass_kv_take_plan(cpa_context *c, cpa_attend_plan **out);
/* Adds an empty transfer, with a plan for what this rank attends of it. Valid until the next one. */
cpa_status cpa_pass_kv_add_transfer(cpa_context *c, cpa_kv_transfer **out);
/* What the open transfer packs, and whom it exchanges with. */
cpa_status cpa_pass_kv_add_span(cpa_context *c, cpa_kv_span span);
cpa_status cpa_pass_kv_add_route(cpa_context *c, cpa_kv_route route);
/* Sums up the routes, and finds the send staging for the spans. Set send_blocks before where own keys are attended in
 * staging, whoever receives them. */
void cpa_pass_kv_close_transfer(cpa_context *c);
cpa_status cpa_pass_kv_add_piece(cpa_context *c, cpa_kv_pieces *pieces, cpa_kv_piece piece);

/* Where the next piece goes. */
typedef struct cpa_kv_cursor {
    int64_t segment, used; /* used: blocks */
} cpa_kv_cursor;

static inline void cpa_pass_kv_close_segment(cpa_kv_cursor *at) {
    if (at->used > 0) *at = (cpa_kv_cursor){at->segment + 1, 0};
}

/* Blocks that `tokens` tokens take. */
static inline int64_t cpa_pass_kv_blocks(const cpa_context *c, int64_t tokens) {
    return (tokens + c->options.block_size - 1) / c->options.block_size;
}

/* The first block of staging that a transfer sends from, once it is closed, and that it receives in. Regions of even
 * transfers lie before those of odd ones. */
int64_t cpa_pass_kv_send_block(const cpa_pass_kv *kv, int64_t transfer);
int64_t cpa_pass_kv_recv_block(const cpa_pass_kv *kv, int64_t transfer, int32_t region);

cpa_status cpa_pass_kv_plan_rounds(cpa_context *c);
cpa_status cpa_pass_kv_plan_gather(cpa_context *c);

#endif
