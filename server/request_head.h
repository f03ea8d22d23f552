/* What of the head of a request libmicrohttpd takes, or reads in its own way, and no server should: another one on the
 * way might see other requests in it. */
#ifndef CPA_SERVER_REQUEST_HEAD_H
#define CPA_SERVER_REQUEST_HEAD_H

#include <microhttpd.h>

#include "server/refusal.h"

/* `uri` is where the head has it, of uri_bytes before anything was taken from it, and `is_odd` says that it had a space
 * or an escaped NUL. 0, with the refusal filled (400), for: NUL or CR in a line, lines that go on in the next, names that
 * are none, no Host or two in HTTP/1.1, and more than one header, or another than "chunked", that tells where the body
 * ends. From the callback of a request, when its header has come. */
int cpa_request_head_check(struct MHD_Connection *connection, const char *method, const char *uri, size_t uri_bytes,
                           int is_odd, const char *version, cpa_refusal *refusal);

#endif
