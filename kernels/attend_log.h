/* Which kernels attends run, in the log. */
#ifndef CPA_KERNELS_ATTEND_LOG_H
#define CPA_KERNELS_ATTEND_LOG_H

#include <cpattn/ops.h>

/* Says at CPA_LOG_DEBUG which kernels an attend runs, once for each shape and choice of the process. */
void cpa_attend_log_kernels(const cpa_attend_plan *plan, const cpa_attend_args *args);
/* Says at CPA_LOG_WARN, once for each reason, that no tensor cores are used: `why` is what they do not take. */
void cpa_attend_log_plain(const char *why);

#endif
