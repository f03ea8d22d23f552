/* Sizes of an engine that options leave at 0: for the engine, and for who computes from them before there is one. */
#ifndef CPA_SCHEDULE_DEFAULT_SIZES_H
#define CPA_SCHEDULE_DEFAULT_SIZES_H

#include <cpattn/engine.h>
#include <cpattn/xattn.h>

static inline void cpa_engine_default_sizes(cpa_engine_options *o) {
    if (o->block_size == 0) o->block_size = 16;
    /* Groups and blocks of XAttention never straddle ranks. */
    if (o->interleave == 0 && o->sparse_stride != 0 && o->block_size < CPA_XATTN_MOST_BLOCK)
        o->interleave = CPA_XATTN_MOST_BLOCK;
    if (o->interleave == 0) o->interleave = o->block_size;
    if (o->max_num_batched_tokens == 0) o->max_num_batched_tokens = 2048;
    if (o->max_num_seqs == 0) o->max_num_seqs = 256;
    if (o->window_seqs == 0) o->window_seqs = o->max_num_seqs;
}

#endif
