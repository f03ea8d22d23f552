/* The transports that there are, a row each: whoever adds one adds a row here, a kind to cpa_transport_kind, and the
 * table. */
#ifndef CPA_TRANSPORTS_H
#define CPA_TRANSPORTS_H

#include <cpattn/engine.h>

#include "comm/comm.h"

typedef struct cpa_transport_row {
    cpa_transport_kind kind;
    const char *name;                 /* name in options and messages */
    const char *what;                 /* what the transport is, in words */
    cpa_backend memory;               /* back end of the devices whose memory is carried */
    const cpa_transport_table *table; /* NULL: this build does not have it */
} cpa_transport_row;

/* In the order of their kinds. */
enum { CPA_TRANSPORTS = 3 };
extern const cpa_transport_row cpa_transport_rows[CPA_TRANSPORTS];

/* The words for a cpa_transport_kind, "auto" first; then NULL. */
extern const char *const cpa_transport_names[CPA_TRANSPORTS + 2];

/* The transport of a kind other than auto, if it carries the memory of the back end's devices. */
cpa_status cpa_transport_find(cpa_transport_kind kind, cpa_backend memory, const cpa_transport_table **out,
                              cpa_error *err);

#endif
