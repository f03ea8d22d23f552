/* The table of operators beside attention. The argument structs are those of the public headers cpattn/nn.h,
 * cpattn/experts.h, cpattn/topk.h, cpattn/compress.h, cpattn/xattn.h and, for making rows, cpattn/indexer.h, checked: no stride is 0 any
 * more, and there is at least one row (of mark_tokens: a restart or a token; expert_permute: any number; xattn_stats: keys need not be). CPA_UNSUPPORTED
 * says that there is no kernel for a shape. */
#ifndef CPA_KERNELS_NN_H
#define CPA_KERNELS_NN_H

#include <cpattn/compress.h>
#include <cpattn/experts.h>
#include <cpattn/indexer.h>
#include <cpattn/nn.h>
#include <cpattn/topk.h>
#include <cpattn/xattn.h>

#include "kernels/device.h"

/* The operators, for what a back end says of each alike: X(name) with cpa_<name>_args. The random numbers, exponentials
 * and thresholds of sample are those of kernels/draw.h, the scores of expert_route those of kernels/route.h, and
 * the orders of topk those of kernels/topk.h. */
#define CPA_INDEX_OPERATORS(X) X(index_write) X(index_q) X(topk) X(topk_merge)
#define CPA_COMPRESS_OPERATORS(X)                                                                                      \
    X(inverse_rope_quant) X(compress_state_write) X(compress_write) X(compress_halo_pack) X(q_norm_rope_kv_write)
#define CPA_XATTN_OPERATORS(X)                                                                                         \
    X(xattn_pack_q)                                                                                                    \
    X(xattn_pack_k) X(xattn_stats) X(xattn_merge_stats) X(xattn_block_sums) X(xattn_scores) X(xattn_select)
#define CPA_EXPERT_OPERATORS(X) X(expert_route) X(expert_permute) X(expert_linear) X(expert_combine)
#define CPA_NN_OPERATORS(X)                                                                                            \
    X(rmsnorm)                                                                                                         \
    X(rmsnorm2)                                                                                                        \
    X(rotate)                                                                                                          \
    X(qk_norm_rope)                                                                                                    \
    X(latent_norm_rope)                                                                                                \
    X(swiglu)                                                                                                          \
    X(embed)                                                                                                           \
    X(linear)                                                                                                          \
    X(sample)                                                                                                          \
    X(rank_tokens)                                                                                                     \
    X(mark_tokens) CPA_INDEX_OPERATORS(X) CPA_EXPERT_OPERATORS(X) CPA_COMPRESS_OPERATORS(X) CPA_XATTN_OPERATORS(X)

/* What linear of few rows does by itself, so that no kernel comes between two products of a layer. */
typedef struct cpa_linear_fusion {
    const void *norm_weight; /* NULL; or [inputs]: x, of one row, is normed first, as by rmsnorm, with no offset */
    float norm_eps;
    int32_t
        gated; /* the weights are those of gates and, behind them, of what they scale: out [rows, outputs / 2] is what
                    * swiglu makes of the result */
    int32_t adds; /* out += result, rounded to the dtype of out first */
} cpa_linear_fusion;

/* What expert_linear of few places does by itself. */
typedef struct cpa_expert_fusion {
    int32_t gated; /* weights are, of each expert, those of gates and, behind them, of what they scale: out [rows,
                    * outputs / 2] is what swiglu makes of the result */
    const cpa_linear_args
        *beside;         /* NULL; or a product of at most fused_rows rows with weights of the same dtype, gated
                                    * alike, at multiples of 16 bytes, which waits for no choice of experts */
    int32_t beside_adds; /* its out += the product, rounded first */
} cpa_expert_fusion;

struct cpa_nn_table {
#define CPA_NN_ENTRY(name) cpa_status (*name)(const cpa_##name##_args *args, cpa_stream *stream);
    CPA_NN_OPERATORS(CPA_NN_ENTRY)
#undef CPA_NN_ENTRY
    /* linear of 1 to fused_rows rows, of 16-bit elements. With a norm, at most normed_inputs inputs, a multiple of 8,
     * and rows, weights and the norm's lie at multiples of 16 bytes. NULL: the back end has none. */
    cpa_status (*linear_fused)(const cpa_linear_args *args, const cpa_linear_fusion *fusion, cpa_stream *stream);
    int32_t fused_rows, normed_inputs;
    /* expert_linear of few places in 16-bit elements, and whether it takes a product. NULL: the back end has none. */
    int (*fuses_experts)(const cpa_expert_linear_args *args, const cpa_stream *stream);
    cpa_status (*expert_fused)(const cpa_expert_linear_args *args, const cpa_expert_fusion *fusion, cpa_stream *stream);
    /* A router's product to fp32, expert_route of it and expert_permute in turn, with all strides set, and whether they are
     * taken. NULL: the back end has none. */
    int (*chooses_experts)(const cpa_linear_args *router, const cpa_stream *stream);
    cpa_status (*expert_choose)(const cpa_linear_args *router, const cpa_expert_route_args *route,
                                const cpa_expert_permute_args *permute, cpa_stream *stream);
};

#endif
