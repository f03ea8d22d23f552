/* Pictures as SVG within a page of HTML. Colours are variables that the page sets (cpa_svg_put_style). */
#ifndef CPA_CHART_SVG_H
#define CPA_CHART_SVG_H

#include <stdio.h>

#include "program/chart/picture.h"

/* The rules of CSS that give inks their colours, by what the reader prefers: light or dark. */
void cpa_svg_put_style(FILE *out);

void cpa_svg_put(const cpa_picture *picture, FILE *out);

/* Text as it stands in HTML and XML; control characters, which these do not have, are left out. */
void cpa_svg_put_text(const char *text, FILE *out);

#endif
