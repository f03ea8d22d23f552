/* Text to token ids and back, without an answer: POST /tokenize and /detokenize, as vLLM's. */
#ifndef CPA_SERVER_TOKENIZE_H
#define CPA_SERVER_TOKENIZE_H

#include "server/exchange.h"

enum MHD_Result cpa_serve_tokenize(cpa_exchange *exchange);
enum MHD_Result cpa_serve_detokenize(cpa_exchange *exchange);

#endif
