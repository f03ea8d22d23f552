/* Requests of HTTP from their first line to the call of their route. */
#ifndef CPA_SERVER_RECEIVE_H
#define CPA_SERVER_RECEIVE_H

#include <microhttpd.h>

/* The MHD_AccessHandlerCallback, with a cpa_server as its ctx. */
enum MHD_Result cpa_receive(void *server, struct MHD_Connection *connection, const char *url, const char *method,
                            const char *version, const char *upload, size_t *upload_bytes, void **call);

/* The MHD_RequestCompletedCallback: the reply is delivered, or the connection is lost. */
void cpa_receive_completed(void *server, struct MHD_Connection *connection, void **call,
                           enum MHD_RequestTerminationCode why);

#endif
