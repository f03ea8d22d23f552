/* Text to token ids and back, without an answer: POST /tokenize and /detokenize, as vLLM's; cpa_route's prepare and
 * serve. */
#ifndef CPA_SERVER_TOKENIZE_H
#define CPA_SERVER_TOKENIZE_H

#include "server/http_exchange.h"

void cpa_prepare_tokens(cpa_http_exchange *exchange);
void cpa_prepare_text(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_conversion(cpa_http_exchange *exchange);

#endif
