/* What is used of cairo, loaded where PNGs are asked for: machines that compute need not have it. */
#ifndef CPA_PLOT_CAIRO_LIBRARY_H
#define CPA_PLOT_CAIRO_LIBRARY_H

#include <cairo.h>

#include <cpattn/status.h>

/* The functions, without `cairo_`. */
#define CPA_CAIRO_FUNCTIONS(F)                                                                                         \
    F(create)                                                                                                          \
    F(destroy)                                                                                                         \
    F(fill)                                                                                                            \
    F(image_surface_create)                                                                                            \
    F(line_to)                                                                                                         \
    F(move_to)                                                                                                         \
    F(new_path)                                                                                                        \
    F(paint)                                                                                                           \
    F(rectangle)                                                                                                       \
    F(scale)                                                                                                           \
    F(select_font_face)                                                                                                \
    F(set_dash)                                                                                                        \
    F(set_font_size)                                                                                                   \
    F(set_line_width)                                                                                                  \
    F(set_source_rgba)                                                                                                 \
    F(show_text)                                                                                                       \
    F(status)                                                                                                          \
    F(status_to_string)                                                                                                \
    F(stroke)                                                                                                          \
    F(surface_destroy)                                                                                                 \
    F(surface_write_to_png_stream)                                                                                     \
    F(text_extents)                                                                                                    \
    F(translate)

typedef struct cpa_cairo {
#define CPA_CAIRO_MEMBER(name) __typeof__(cairo_##name) *name;
    CPA_CAIRO_FUNCTIONS(CPA_CAIRO_MEMBER)
#undef CPA_CAIRO_MEMBER
} cpa_cairo;

/* The library stays loaded as long as the process. CPA_UNSUPPORTED, saying what is missing, if there is none. */
cpa_status cpa_cairo_load(cpa_cairo *out, cpa_error *err);

#endif
