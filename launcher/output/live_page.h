/* The page of GET /status: what has happened lately on a server, in the charts of `cp_attn plot`. */
#ifndef CPA_LAUNCHER_LIVE_PAGE_H
#define CPA_LAUNCHER_LIVE_PAGE_H

#include "launcher/output/live_history.h"

/* The page in HTML, as of now, which the caller frees; its script (live_page.js) asks for a new one again and again.
 * NULL without memory. Any thread. */
char *cpa_live_page_render(cpa_live_history *history, const char *title, double now_s);

#endif
