/* What a server is made of, for the files of this folder. */
#ifndef CPA_SERVER_INTERNAL_H
#define CPA_SERVER_INTERNAL_H

#include <microhttpd.h>
#include <stdatomic.h>

#include "server/server.h"

typedef enum cpa_server_state {
    CPA_SERVER_STARTING = 0, /* no engine yet */
    CPA_SERVER_READY,
    CPA_SERVER_DRAINING,
    CPA_SERVER_FAILED
} cpa_server_state;

struct cpa_server {
    /* Constant while it listens. */
    cpa_server_options options; /* with what stands for zeros; its texts are the server's */
    struct MHD_Daemon *daemon;
    int port;
    int64_t created; /* seconds of Unix time */
    /* By any thread. */
    _Atomic(cpa_server_state) state;
    atomic_llong connections; /* open now */
    cpa_server_engine engine; /* constant once the state is not CPA_SERVER_STARTING */
};

#endif
