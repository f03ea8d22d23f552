/* What every transport asks of the messages of an exchange. */
#ifndef CPA_COMM_MESSAGES_H
#define CPA_COMM_MESSAGES_H

#include "comm/comm.h"

/* CPA_INVALID unless each message goes to another rank, none to the same twice, and sizes and pointers agree. */
cpa_status cpa_messages_check(const cpa_control *control, const cpa_message *msgs, int32_t n, cpa_error *err);

#endif
