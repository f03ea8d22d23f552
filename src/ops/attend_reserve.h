/* What reserved plans of attend and of context attention are checked for alike. `where` begins the line that says what
 * is wrong. */
#ifndef CPA_OPS_ATTEND_RESERVE_H
#define CPA_OPS_ATTEND_RESERVE_H

#include "kernels/attend_plan.h"

/* The limits of a reservation whose shape and block size are checked; sets its table_stride, and total_rows if that is
 * 0. */
cpa_status cpa_check_reservation(const char *where, cpa_attend_reservation *reservation, cpa_error *err);

/* The arguments of an update, as far as they lie on the host, in *out. */
cpa_status cpa_take_attend_update(const char *where, const cpa_attend_reservation *reservation,
                                  const cpa_attend_update_args *given, cpa_attend_update *out, cpa_error *err);

/* What the last update of a plan that is done has refused, as cpa_attend_plan_refused. */
cpa_status cpa_tell_refused(const char *where, const cpa_attend_plan *plan, cpa_error *err);

#endif
