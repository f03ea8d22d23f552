/* The page of GET /status, status_page.html, which asks /metrics and /health again and again; made at build time. */
#ifndef CPA_SERVER_STATUS_PAGE_H
#define CPA_SERVER_STATUS_PAGE_H

#include <stddef.h>

extern const unsigned char cpa_status_page[];
extern const size_t cpa_status_page_bytes;

#endif
