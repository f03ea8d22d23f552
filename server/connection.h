/* Connections as such: how many there are, and those on which nobody speaks HTTP. */
#ifndef CPA_SERVER_CONNECTION_H
#define CPA_SERVER_CONNECTION_H

#include <microhttpd.h>

/* The MHD_NotifyConnectionCallback, with a cpa_server as its ctx: counts. */
void cpa_connection_notify(void *server, struct MHD_Connection *connection, void **state,
                           enum MHD_ConnectionNotificationCode what);

/* The callback of MHD_OPTION_URI_LOG_CALLBACK: a request has begun. Returns NULL. */
void *cpa_connection_speaks(void *server, const char *uri, struct MHD_Connection *connection);

/* Whether there were enough others already when this one came. */
int cpa_connection_is_crowded(struct MHD_Connection *connection);

#endif
