/* The socket that a server listens on. */
#ifndef CPA_SERVER_LISTEN_H
#define CPA_SERVER_LISTEN_H

#include <cpattn/status.h>

/* Listens on the first address of `host` that can be had; port 0 is any that is free. The caller closes *out; *bound is
 * its port. CPA_INVALID, with host and port and why, if there is none. */
cpa_status cpa_listen(const char *host, int port, int *out, int *bound, cpa_error *err);

#endif
