/* What a server says of itself: routes without a body. */
#ifndef CPA_SERVER_STATUS_ROUTES_H
#define CPA_SERVER_STATUS_ROUTES_H

#include "server/http_exchange.h"

enum MHD_Result cpa_serve_live(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_health(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_version(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_metrics(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_status_page(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_models(cpa_http_exchange *exchange);
enum MHD_Result cpa_serve_model(cpa_http_exchange *exchange); /* /v1/models/NAME */

#endif
