/* Answers as server-sent events (the HTML standard, 9.2): chunks as they come, "data: [DONE]" at the end. */
#ifndef CPA_SERVER_EVENT_STREAM_H
#define CPA_SERVER_EVENT_STREAM_H

#include "server/answer.h"

/* Queues the reply to the exchange, which writes the answer; the exchange keeps it. */
enum MHD_Result cpa_event_stream_reply(cpa_http_exchange *exchange);

#endif
