#include "program/chart/page.h"

#include "program/chart/svg.h"

static void put_head(const char *title, FILE *out) {
    fputs(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>",
        out);
    cpa_svg_put_text(title, out);
    fputs("</title>\n<style>\n", out);
    cpa_svg_put_style(out);
    fputs(
        "body{background:var(--ground);color:var(--i0);font:15px system-ui,sans-serif;max-width:920px;margin:2em auto;"
        "padding:0 1em}\nh1{font-size:1.4em}h2{font-size:1.05em;margin:1.6em 0 .3em}figure{margin:0}"
        "figcaption{font-size:.85em}\n"
        "</style></head>\n",
        out);
}

static void put_figure(const cpa_picture *picture, FILE *out) {
    fputs("<figure><h2>", out);
    cpa_svg_put_text(picture->title, out);
    fputs("</h2>\n", out);
    cpa_svg_put(picture, out);
    if (picture->note) {
        fputs("<figcaption>", out);
        cpa_svg_put_text(picture->note, out);
        fputs("</figcaption>\n", out);
    }
    fputs("</figure>\n", out);
}

void cpa_page_put(const cpa_page *page, FILE *out) {
    put_head(page->title, out);
    fputs("<body><h1>", out);
    cpa_svg_put_text(page->title, out);
    fputs("</h1>\n", out);
    if (page->script_bytes > 0) fputs("<p id=\"state\"></p>\n", out);
    fputs("<main>\n", out);
    for (int64_t i = 0; i < page->n; i++) put_figure(&page->pictures[i], out);
    fputs("</main>\n", out);
    if (page->script_bytes > 0) {
        fputs("<script>\n", out);
        fwrite(page->script, 1, page->script_bytes, out);
        fputs("</script>\n", out);
    }
    fputs("</body></html>\n", out);
}
