/* A mixture whose experts are spread over the ranks, each on one: rank r has cpa_own_experts(experts, ranks, r). In each
 * piece
 *
 *     a rank has                            and sends
 *     rows sorted by expert, so by rank     how many rows each expert gets, and whether rows are left
 *                                           the rows themselves, one for each of their experts
 *     rows of all ranks for its experts     what its experts give for them
 *     what all experts gave for its rows
 *
 * and adds up as it would with all experts. Ranks have different numbers of rows: pieces go on until no rank has any
 * left. How many rows go where has to be known on the host, so that this is for devices whose work is done when the call
 * returns, as the host's is; others gather (mixture_gathered.h). */
#ifndef CPA_MODEL_MIXTURE_SENT_H
#define CPA_MODEL_MIXTURE_SENT_H

#include "src/model/mixture.h"

/* Whether rows can be sent to their experts on that device: CPA_UNSUPPORTED with a line. */
cpa_status cpa_mixture_check_sent(const cpa_device *device, cpa_error *err);

/* cpa_mixture_run, of steps without slices; collective. */
cpa_status cpa_mixture_run_sent(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights,
                                const cpa_mixture_rows *rows, cpa_stream *stream);

#endif
