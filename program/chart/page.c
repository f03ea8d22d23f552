#include "plot/page.h"

#include <stdio.h>

#include "base/check.h"
#include "plot/svg.h"
#include "program/output_file.h"

static void put_page(FILE *out, const char *title, const cpa_picture *pictures, int64_t n) {
    fputs(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>",
        out);
    cpa_svg_put_text(title, out);
    fputs("</title>\n<style>\n", out);
    cpa_svg_put_style(out);
    fputs(
        "body{background:var(--ground);color:var(--i0);font:15px system-ui,sans-serif;max-width:920px;margin:2em auto;"
        "padding:0 1em}\nh1{font-size:1.4em}h2{font-size:1.05em;margin:1.6em 0 .3em}figure{margin:0}\n"
        "</style></head>\n<body><h1>",
        out);
    cpa_svg_put_text(title, out);
    fputs("</h1>\n", out);
    for (int64_t i = 0; i < n; i++) {
        fputs("<figure><h2>", out);
        cpa_svg_put_text(pictures[i].title, out);
        fputs("</h2>\n", out);
        cpa_svg_put(&pictures[i], out);
        fputs("</figure>\n", out);
    }
    fputs("</body></html>\n", out);
}

cpa_status cpa_page_write(const char *path, const char *title, const cpa_picture *pictures, int64_t n, cpa_error *err) {
    cpa_output_file output;
    CPA_TRY(cpa_output_open(path, &output, err));
    put_page(output.file, title, pictures, n);
    return cpa_output_close(&output, !ferror(output.file), err);
}
