#include "program/chart/svg.h"

static const char *const anchors[] = {"start", "middle", "end"};

void cpa_svg_put_text(const char *text, FILE *out) {
    for (; *text; text++) {
        switch (*text) {
            case '&': fputs("&amp;", out); break;
            case '<': fputs("&lt;", out); break;
            case '>': fputs("&gt;", out); break;
            case '"': fputs("&quot;", out); break;
            default:
                if ((unsigned char)*text >= ' ') fputc(*text, out);
        }
    }
}

static void put_theme(const uint32_t *theme, FILE *out) {
    fputs(":root{", out);
    for (int ink = 0; ink < CPA_INKS; ink++) fprintf(out, "--i%d:#%06x;", ink, theme[ink]);
    fprintf(out, "--ground:#%06x}", theme[CPA_INKS]);
}

void cpa_svg_put_style(FILE *out) {
    fputs(":root{color-scheme:light dark}\n", out);
    put_theme(cpa_theme_light, out);
    fputs("\n@media (prefers-color-scheme:dark){", out);
    put_theme(cpa_theme_dark, out);
    fputs("}\nsvg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif}\n", out);
    for (int ink = 0; ink < CPA_INKS; ink++)
        fprintf(out, ".f%d{fill:var(--i%d)}.s%d{fill:none;stroke:var(--i%d);stroke-width:1.5}\n", ink, ink, ink, ink);
}

static void put_line(const cpa_picture *picture, const cpa_shape *line, FILE *out) {
    fprintf(out, "<polyline class=\"s%d\"%s points=\"", (int)line->ink,
            line->is_dashed ? " stroke-dasharray=\"4 3\"" : "");
    for (int64_t i = 0; i < line->n_points; i++) {
        const cpa_point *point = &picture->points[line->first_point + i];
        fprintf(out, "%s%.1f,%.1f", i ? " " : "", point->x, point->y);
    }
    fputs("\"/>\n", out);
}

static void put_box(const cpa_shape *box, FILE *out) {
    fprintf(out, "<rect class=\"f%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"", (int)box->ink, box->at.x,
            box->at.y, box->width, box->height);
    if (box->opacity < 1) fprintf(out, " fill-opacity=\"%.3f\"", box->opacity);
    if (!box->text) {
        fputs("/>\n", out);
        return;
    }
    fputs("><title>", out);
    cpa_svg_put_text(box->text, out);
    fputs("</title></rect>\n", out);
}

void cpa_svg_put(const cpa_picture *picture, FILE *out) {
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"%.0f\" height=\"%.0f\" "
            "viewBox=\"0 0 %.0f %.0f\" aria-label=\"",
            picture->width, picture->height, picture->width, picture->height);
    cpa_svg_put_text(picture->title, out);
    fputs("\">\n", out);
    for (int64_t i = 0; i < picture->n_shapes; i++) {
        const cpa_shape *shape = &picture->shapes[i];
        switch (shape->kind) {
            case CPA_SHAPE_LINE: put_line(picture, shape, out); break;
            case CPA_SHAPE_BOX: put_box(shape, out); break;
            case CPA_SHAPE_TEXT:
                fprintf(out, "<text class=\"f%d\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", (int)shape->ink,
                        shape->at.x, shape->at.y, anchors[shape->anchor]);
                cpa_svg_put_text(shape->text, out);
                fputs("</text>\n", out);
        }
    }
    fputs("</svg>\n", out);
}
