/* The routes that generate text. */
#ifndef CPA_SERVER_COMPLETIONS_H
#define CPA_SERVER_COMPLETIONS_H

#include "server/exchange.h"

enum MHD_Result cpa_serve_completions(cpa_exchange *exchange);
enum MHD_Result cpa_serve_chat(cpa_exchange *exchange);

#endif
