/* Text to token ids and back, without an answer: POST /tokenize and /detokenize, as vLLM's; cpa_route's prepare and
 * serve. */
#ifndef CPA_SERVER_TOKENIZE_H
#define CPA_SERVER_TOKENIZE_H

#include "server/exchange.h"

void cpa_prepare_tokens(cpa_exchange *exchange);
void cpa_prepare_text(cpa_exchange *exchange);
enum MHD_Result cpa_serve_conversion(cpa_exchange *exchange);

#endif
