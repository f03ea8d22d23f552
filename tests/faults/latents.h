/* Deliberate bugs in how attend reads latents. */
#ifndef CPA_TESTS_FAULT_LATENTS_H
#define CPA_TESTS_FAULT_LATENTS_H

#include "kernels/operators.h"

/* Whether one of them is armed. */
int cpa_fault_is_of_latents(void);
/* Whether one of them is that which the program is to arm. */
int cpa_fault_is_named_of_latents(void);

/* An attend over a cache of latents as it would be with the armed bug, by the operators that have none. `rows`: the end
 * of the rows of the plan's items. Through the host: not in graphs. */
cpa_status cpa_fault_attend_latents(const cpa_operator_table *real, const cpa_attend_plan *plan, int64_t rows,
                                    const cpa_attend_args *args, const void *ready_q, cpa_stream *stream);

#endif
