/* Connections as such: how many there are, and those on which nobody speaks HTTP. */
#ifndef CPA_SERVER_CONNECTION_H
#define CPA_SERVER_CONNECTION_H

#include <microhttpd.h>
#include <pthread.h>

#include "server/refusal.h"

/* Connections beyond the bound that are there to be told so, and for probes. */
enum { CPA_TOLD_CONNECTIONS = 64 };

/* Those that are open, the oldest first. */
typedef struct cpa_connections {
    pthread_mutex_t lock;
    struct cpa_connection_state *first;
    int64_t n_crowded; /* connections beyond the bound */
} cpa_connections;

/* The MHD_NotifyConnectionCallback, with a cpa_server as its ctx: counts. */
void cpa_connection_notify(void *server, struct MHD_Connection *connection, void **state,
                           enum MHD_ConnectionNotificationCode what);

/* The callback of MHD_OPTION_URI_LOG_CALLBACK: a request has begun. Returns NULL. */
void *cpa_connection_speaks(void *server, const char *uri, struct MHD_Connection *connection);

/* Whether the head of the request is one, by request_head.h; else 0, with the refusal filled. */
int cpa_connection_check_head(struct MHD_Connection *connection, const char *method, const char *version,
                              cpa_refusal *refusal);

/* A request has come whole; and it is answered, so that the next may come. */
void cpa_connection_has_read(struct MHD_Connection *connection);
void cpa_connection_reads(struct MHD_Connection *connection);

/* Ends the connections on which the same request has been coming for more than so many seconds, the wait for it
 * included. The time-out of libmicrohttpd begins again with each byte. Any thread. */
void cpa_connection_end_slow(cpa_connections *connections, double seconds);

/* Whether there were enough others already when this one came. Of these, who has asked for nothing yet makes room for
 * the next when there are many, so that probes come through beside any number of others. */
int cpa_connection_is_crowded(struct MHD_Connection *connection);

#endif
