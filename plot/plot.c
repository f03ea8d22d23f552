#include "plot/plot.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/array.h"
#include "base/check.h"
#include "base/file.h"
#include "base/json_file.h"
#include "plot/png.h"
#include "plot/results.h"
#include "plot/timeline.h"
#include "program/chart/page.h"
#include "program/chart/pairs.h"
#include "program/exit_code.h"
#include "program/field.h"
#include "program/output_file.h"

typedef struct plot_options {
    char output[CPA_TEXT_BYTES], png[CPA_TEXT_BYTES], title[CPA_TEXT_BYTES];
    int64_t help;
} plot_options;

#define TEXT(member, value) CPA_FIELD_TEXT, offsetof(plot_options, member), .initial = value
static const cpa_field table[] = {
    {NULL, "output", "FILE", TEXT(output, "plot.html"), .help = "the page, which needs no other file and no network"},
    {NULL, "png", "FOLDER", TEXT(png, ""), .help = "each picture also as FOLDER/NAME.png, on white"},
    {NULL, "title", "TEXT", TEXT(title, "cp_attn"), .help = "of the page"},
    {NULL, "help", NULL, CPA_FIELD_FLAG, offsetof(plot_options, help), .initial = "false",
     .help = "print this text and stop"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

static void print_help(void) {
    printf(
        "usage: cp_attn plot FILE... [options]\n"
        "Draws files of --result-json, of runs, bench serve and bench scaling, and of --timeline: latencies,\n"
        "speedup by ranks, what ranks did by time, requests and blocks of the cache by time, and bytes\n"
        "between ranks.\n\n");
    for (int f = 0; f < N_FIELDS; f++) cpa_field_print_help(&table[f], table[f].type != CPA_FIELD_FLAG, stdout);
    printf("exit codes: 0 done, 2 bad usage or a file that is none of these, 3 a fault\n");
}

/* ---- pictures ---- */

typedef struct gallery {
    cpa_picture *pictures;
    int64_t n, capacity;
    cpa_results results;
} gallery;

/* A new picture, whose title is "WHAT", or "WHAT: FILE"; NULL without memory. Valid until the next one. */
static cpa_picture *add_picture(gallery *g, const char *name, const char *title, const char *label) {
    if (!cpa_array_reserve(&g->pictures, &g->capacity, g->n + 1, sizeof *g->pictures)) return NULL;
    cpa_picture *picture = &g->pictures[g->n++];
    *picture = (cpa_picture){.name = name};
    snprintf(picture->title, sizeof picture->title, label ? "%s: %s" : "%s", title, label);
    return picture;
}

static cpa_status draw_lines(gallery *g, const char *name, const char *title, const char *label,
                             const cpa_series_set *set, const cpa_lines_style *style, cpa_error *err) {
    if (set->n == 0) return CPA_OK;
    cpa_picture *picture = add_picture(g, name, title, label);
    if (!picture) return cpa_fail(err, CPA_NO_MEMORY, "plot: no memory for the picture %s", name);
    cpa_lines_draw(picture, set, style);
    return CPA_OK;
}

/* What all files have together. */
static cpa_status draw_results(gallery *g, cpa_error *err) {
    static const cpa_lines_style requests = {.x_label = "ms", .y_label = "share of requests", .x_is_log = 1};
    static const cpa_lines_style tokens = {.x_label = "ms", .y_label = "share of tokens", .x_is_log = 1};
    static const cpa_lines_style speedup = {
        .x_label = "ranks", .y_label = "speedup over one rank", .has_marks = 1, .x_is_whole = 1};
    cpa_results_finish(&g->results);
    CPA_TRY(draw_lines(g, "scaling", "Speedup by ranks", NULL, &g->results.scaling, &speedup, err));
    CPA_TRY(draw_lines(g, "ttft", "Time to the first token (TTFT)", NULL, &g->results.ttft, &requests, err));
    return draw_lines(g, "itl", "Time between two tokens of a request (ITL)", NULL, &g->results.itl, &tokens, err);
}

/* ---- files ---- */

static cpa_status draw_timeline(gallery *g, const cpa_timeline_file *file, const char *label, cpa_error *err) {
    static const cpa_lines_style requests = {
        .x_label = "seconds", .y_label = "requests", .is_step = 1, .y_is_whole = 1};
    static const cpa_lines_style cache = {.x_label = "seconds", .y_label = "blocks", .is_step = 1, .y_is_whole = 1};
    if (file->times.ranks > 0) {
        cpa_picture *picture = add_picture(g, "timeline", "Ranks by time", label);
        if (!picture) return cpa_fail(err, CPA_NO_MEMORY, "plot: no memory for a timeline");
        cpa_rank_times_draw(picture, &file->times);
    }
    CPA_TRY(draw_lines(g, "requests", "Requests", label, &file->requests, &requests, err));
    CPA_TRY(draw_lines(g, "cache", "Blocks of the cache that requests have", label, &file->cache, &cache, err));
    if (file->has_bytes) {
        cpa_picture *picture = add_picture(g, "pairs", "Bytes between ranks", label);
        if (!picture) return cpa_fail(err, CPA_NO_MEMORY, "plot: no memory for bytes");
        cpa_pairs_draw(picture, file->bytes, file->times.ranks);
    }
    return CPA_OK;
}

static cpa_status add_timeline(gallery *g, const char *path, const char *label, cpa_error *err) {
    cpa_timeline_file file;
    cpa_status status = cpa_timeline_file_read(path, &file, err);
    if (status == CPA_OK) status = draw_timeline(g, &file, label, err);
    cpa_timeline_file_release(&file);
    return status;
}

static cpa_status add_result(gallery *g, const char *path, const char *label, cpa_error *err) {
    json_t *root;
    CPA_TRY(cpa_json_load(path, &root, err));
    const cpa_json file = {path, "", root};
    const cpa_status status = cpa_results_read(&g->results, &file, label, err);
    json_decref(root);
    return status;
}

/* A timeline is a list, results are an object. */
static cpa_status is_list(const char *path, int *out, cpa_error *err) {
    const char *why;
    int byte;
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, cpa_file_failure(CPA_INVALID), "%s: %s", path, why);
    do byte = fgetc(file);
    while (byte != EOF && isspace(byte));
    *out = byte == '[';
    fclose(file);
    return CPA_OK;
}

static const char *base_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* What a file is called in pictures: its name without folders, and "(2)" for the second of that name. */
static void label_of(char **paths, int i, char *label, size_t bytes) {
    char name[40];
    const char *base = base_of(paths[i]);
    int nth = 1;
    for (int before = 0; before < i; before++) nth += strcmp(base_of(paths[before]), base) == 0;
    cpa_text_quote(base, strlen(base), name, sizeof name);
    snprintf(label, bytes, nth > 1 ? "%s (%d)" : "%s", name, nth);
}

static cpa_status add_file(gallery *g, char **paths, int i, cpa_error *err) {
    char label[60];
    int list = 0;
    label_of(paths, i, label, sizeof label);
    CPA_TRY(is_list(paths[i], &list, err));
    return list ? add_timeline(g, paths[i], label, err) : add_result(g, paths[i], label, err);
}

/* ---- output ---- */

/* FOLDER/NAME.png, or NAME-2.png of the second picture of that name. */
static cpa_status write_png(const gallery *g, int64_t i, const char *folder, cpa_error *err) {
    char path[CPA_TEXT_BYTES + 64], number[16] = "";
    int nth = 1;
    for (int64_t before = 0; before < i; before++) nth += strcmp(g->pictures[before].name, g->pictures[i].name) == 0;
    if (nth > 1) snprintf(number, sizeof number, "-%d", nth);
    snprintf(path, sizeof path, "%s/%s%s.png", folder, g->pictures[i].name, number);
    return cpa_png_write(&g->pictures[i], path, err);
}

static cpa_status write_page(const gallery *g, const plot_options *options, cpa_error *err) {
    const cpa_page page = {.title = options->title, .pictures = g->pictures, .n = g->n};
    cpa_output_file output;
    CPA_TRY(cpa_output_open(options->output, &output, err));
    cpa_page_put(&page, output.file);
    return cpa_output_close(&output, !ferror(output.file), err);
}

static cpa_status write_all(const gallery *g, const plot_options *options, cpa_error *err) {
    if (g->n == 0)
        return cpa_fail(err, CPA_INVALID, "plot: the files have nothing that is drawn: no request got a token");
    for (int64_t i = 0; i < g->n; i++) {
        if (g->pictures[i].failed) return cpa_fail(err, CPA_NO_MEMORY, "plot: no memory for %s", g->pictures[i].title);
        if (options->png[0]) CPA_TRY(write_png(g, i, options->png, err));
    }
    CPA_TRY(write_page(g, options, err));
    printf("%s: %lld pictures\n", options->output, (long long)g->n);
    return cpa_output_flush(err);
}

/* The page takes the place of what is there: no file that it is drawn of. */
static cpa_status check_inputs(const char *output, char **paths, int n, cpa_error *err) {
    struct stat page, input;
    if (stat(output, &page) != 0) return CPA_OK;
    for (int i = 0; i < n; i++)
        if (stat(paths[i], &input) == 0 && input.st_dev == page.st_dev && input.st_ino == page.st_ino)
            return cpa_fail(err, CPA_INVALID, "--output: found '%s', which is drawn, expected another file", paths[i]);
    return CPA_OK;
}

/* Options go to *options, the files, in their order, to the front of argv; *n_files is their number. */
static cpa_status parse(int argc, char **argv, plot_options *options, int *n_files, cpa_error *err) {
    *n_files = 0;
    for (int f = 0; f < N_FIELDS; f++) CPA_TRY(cpa_field_set(&table[f], options, "default", table[f].initial, err));
    for (int i = 1; i < argc; i++) {
        const cpa_field *field;
        if (argv[i][0] == '-')
            CPA_TRY(cpa_field_read_argument(table, N_FIELDS, "plot", argc, argv, &i, options, &field, err));
        else
            argv[(*n_files)++] = argv[i];
    }
    if (options->help) return CPA_OK;
    if (*n_files == 0) return cpa_fail(err, CPA_INVALID, "plot: found no file, expected one at least; see plot --help");
    CPA_TRY(cpa_output_check("--output", options->output, err));
    CPA_TRY(check_inputs(options->output, argv, *n_files, err));
    return options->png[0] ? cpa_output_check_folder("--png", options->png, err) : CPA_OK;
}

int cpa_plot_main(int argc, char **argv) {
    plot_options options = {.help = 0};
    gallery g = {.n = 0};
    cpa_error err;
    int n_files;
    cpa_status status = parse(argc, argv, &options, &n_files, &err);
    if (status == CPA_OK && options.help) {
        print_help();
        return CPA_EXIT_DONE;
    }
    for (int i = 0; status == CPA_OK && i < n_files; i++) status = add_file(&g, argv, i, &err);
    if (status == CPA_OK) status = draw_results(&g, &err);
    if (status == CPA_OK) status = write_all(&g, &options, &err);
    if (status != CPA_OK) fprintf(stderr, "cp_attn: %s\n", err.message);
    for (int64_t i = 0; i < g.n; i++) cpa_picture_release(&g.pictures[i]);
    free(g.pictures);
    cpa_results_release(&g.results);
    return (int)cpa_exit_code_of(status);
}
