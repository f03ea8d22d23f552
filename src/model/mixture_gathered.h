/* A mixture whose experts are spread over the ranks, each on one: rank r has cpa_own_experts(experts, ranks, r). In each
 * piece
 *
 *     a rank has                                and sends
 *     its own rows                              all of them to each rank that has experts
 *     rows of all ranks, and of these the       sums of what its experts give for the rows of each rank, in fp32, as
 *     choices that are its experts              mixtures add: in the order of a row's own ranking
 *     such sums of all ranks for its rows
 *
 * and adds these in the order of the ranks, then what is added beside experts, and rounds once. Every rank computes the
 * router for all rows, by the same kernels over the same bits, so that no choice is made twice or not at all.
 *
 * How long messages are follows from how many rows a step has on each rank, whatever experts these choose. So the host
 * waits for nothing, and steps of fixed shape can be captured in graphs. The price: each row is sent ranks - 1 times, and
 * as many sums in fp32 come back, where mixture_sent.h sends it, and gets a row back, for each of its top_k experts that
 * is elsewhere. */
#ifndef CPA_MODEL_MIXTURE_GATHERED_H
#define CPA_MODEL_MIXTURE_GATHERED_H

#include "src/model/mixture.h"

/* cpa_mixture_run of a mixture that gathers, of steps without slices; collective, over the row_exchange and rank_rows of
 * the step. `out` of the rows may be `added`. */
cpa_status cpa_mixture_run_gathered(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights,
                                    const cpa_mixture_rows *rows, cpa_stream *stream);

#endif
