/* The routes that generate text: cpa_route's prepare and serve. */
#ifndef CPA_SERVER_COMPLETIONS_H
#define CPA_SERVER_COMPLETIONS_H

#include "server/http_exchange.h"

void cpa_prepare_completion(cpa_http_exchange *exchange);
void cpa_prepare_chat(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_generation(cpa_http_exchange *exchange);

#endif
