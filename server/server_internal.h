/* What a server is made of, for the files of this folder. */
#ifndef CPA_SERVER_INTERNAL_H
#define CPA_SERVER_INTERNAL_H

#include <microhttpd.h>
#include <stdatomic.h>

#include "server/api_keys.h"
#include "server/client_watch.h"
#include "server/connection.h"
#include "server/in_flight.h"
#include "server/server.h"
#include "server/waker.h"
#include "server/work.h"
#include "src/grammar/constraints.h"

struct cpa_server {
    /* Constant while the server listens. */
    cpa_server_options options; /* the options given, with defaults for zeros; the texts are the server's */
    cpa_api_keys api_keys;
    struct MHD_Daemon *daemon;
    int port;
    int64_t created;   /* seconds of Unix time */
    uint64_t instance; /* a random number, for ids of answers */
    /* Used by any thread. */
    cpa_connections open;
    atomic_llong connections; /* connections that are open */
    atomic_llong body_bytes;  /* bytes of the bodies that are being read */
    atomic_int is_attached;
    cpa_server_engine engine;     /* constant once attached, which it is where the state is CPA_SERVER_READY */
    cpa_constraints *constraints; /* constant once the engine is attached; NULL: answers cannot be bound */
    cpa_in_flight in_flight;
    cpa_client_watch watch;
    /* Threads for requests and answers; for chats that a process renders, which may keep them waiting; and for grammars
     * that answers are bound to. */
    cpa_work work, rendering, binding;
    cpa_waker waker;
};

#endif
