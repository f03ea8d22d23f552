/* live_page.js; made at build time. */
#ifndef CPA_LAUNCHER_LIVE_PAGE_SCRIPT_H
#define CPA_LAUNCHER_LIVE_PAGE_SCRIPT_H

#include <stddef.h>

extern const unsigned char cpa_live_page_script[];
extern const size_t cpa_live_page_script_bytes;

#endif
