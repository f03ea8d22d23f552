/* A picture as a PNG file, drawn by cairo on the light ground, at twice its size in pixels. */
#ifndef CPA_PLOT_PNG_H
#define CPA_PLOT_PNG_H

#include <cpattn/status.h>

#include "program/chart/picture.h"

/* Writes a whole file (program/output_file.h). CPA_IO, naming it, if that fails; CPA_NO_MEMORY; CPA_UNSUPPORTED without cairo. */
cpa_status cpa_png_write(const cpa_picture *picture, const char *path, cpa_error *err);

#endif
