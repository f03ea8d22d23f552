/* The pictures of a run as one page of HTML that needs nothing else, in the colours that the reader prefers. */
#ifndef CPA_PLOT_PAGE_H
#define CPA_PLOT_PAGE_H

#include <cpattn/status.h>

#include "plot/picture.h"

/* Writes a whole file (program/output_file.h). CPA_IO, naming it, if that fails. */
cpa_status cpa_page_write(const char *path, const char *title, const cpa_picture *pictures, int64_t n, cpa_error *err);

#endif
