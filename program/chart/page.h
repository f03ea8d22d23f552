/* Pictures as one page of HTML that needs nothing else, in the colours that the reader prefers. */
#ifndef CPA_CHART_PAGE_H
#define CPA_CHART_PAGE_H

#include <stdio.h>

#include "program/chart/picture.h"

typedef struct cpa_page {
    const char *title;
    const cpa_picture *pictures; /* [n], in the element `main` */
    int64_t n;
    /* JavaScript that brings the page up to date, and says how that went in the element `state`; script_bytes 0: the
     * page stays as it is, and has neither. */
    const unsigned char *script;
    size_t script_bytes;
} cpa_page;

void cpa_page_put(const cpa_page *page, FILE *out);

#endif
