#include "launcher/bench_options.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/types.h>

#include "base/check.h"

static const char *const dtypes[CPA_DTYPE_COUNT + 1] = {"fp32", "bf16", "fp16", NULL};

#define AT(member) .offset = offsetof(cpa_bench_options, member)
static const cpa_field table[] = {
    {NULL, "shapes", "LIST", CPA_FIELD_TEXT, AT(shapes), .initial = "",
     .help = "cases, comma-separated; a number may end in K, M or G (powers of 1024)"},
    {NULL, "dtype", "TYPE", CPA_FIELD_CHOICE, AT(dtype), .initial = "fp32", .choices = dtypes,
     .help = "fp32, bf16 or fp16"},
    {NULL, "q-heads", "N", CPA_FIELD_INT, AT(q_heads), .initial = "8", .min = 1, .max = 1024, .help = "query heads"},
    {NULL, "kv-heads", "N", CPA_FIELD_INT, AT(kv_heads), .initial = "2", .min = 1, .max = 1024,
     .help = "key and value heads"},
    {NULL, "head-dim", "N", CPA_FIELD_INT, AT(head_dim), .initial = "128", .min = 1, .max = CPA_MAX_HEAD_DIM,
     .help = "width of a head"},
    {NULL, "block-size", "N", CPA_FIELD_INT, AT(block_size), .initial = "16", .min = 1, .max = 4096, .power_of_two = 1,
     .help = "tokens in a block of the KV cache"},
    {NULL, "threads", "N", CPA_FIELD_INT, AT(threads), .initial = "auto", .min = 1, .max = 1024, .word = "auto",
     .help = "threads of a rank; auto: what the program would use"},
    {NULL, "min-time", "S", CPA_FIELD_REAL, AT(min_time_s), .initial = "0.5", .max = 3600,
     .help = "repeat each case for at least S seconds"},
    {NULL, "iters", "N", CPA_FIELD_INT, AT(iterations), .initial = "auto", .min = 1, .max = CPA_BENCH_MAX_ITERATIONS,
     .word = "auto", .help = "repeat each case N times; auto: as --min-time says"},
    {NULL, "json", "FILE", CPA_FIELD_TEXT, AT(json), .initial = "",
     .help = "write the table to FILE as well, which must not exist"},
    {NULL, "help", NULL, CPA_FIELD_FLAG, AT(help), .initial = "false", .help = "print this text and stop"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

/* The option at argv[*i]; advances *i over a value that stands apart. */
static cpa_status read_option(int argc, char **argv, int *i, cpa_bench_options *out, cpa_error *err) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    size_t length = strcspn(arg, "=");
    const cpa_field *field = length > 2 ? cpa_field_find(table, N_FIELDS, arg + 2, length - 2) : NULL;
    if (!field) {
        char found[64];
        cpa_text_quote(arg, strlen(arg), found, sizeof found);
        return cpa_fail(err, CPA_INVALID, "bench: found '%s', expected an option of 'cp_attn bench --help'", found);
    }
    const char *value = arg[length] ? arg + length + 1 : field->type == CPA_FIELD_FLAG ? "true" : NULL;
    if (!value && *i + 1 < argc) value = argv[++*i];
    if (!value) {
        return cpa_fail(err, CPA_INVALID, "bench: --%s: found the end of the command line, expected %s", field->name,
                        field->value_name);
    }
    char where[64];
    snprintf(where, sizeof where, "bench: --%s", field->name);
    return cpa_field_set(field, out, where, value, err);
}

cpa_status cpa_bench_options_parse(int argc, char **argv, cpa_bench_options *out, const char **name, cpa_error *err) {
    cpa_bench_options options = {0};
    const char *positional = NULL;
    for (int f = 0; f < N_FIELDS; f++) CPA_TRY(cpa_field_set(&table[f], &options, "default", table[f].initial, err));
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' || positional) {
            CPA_TRY(read_option(argc, argv, &i, &options, err));
        } else {
            positional = argv[i];
        }
    }
    if (options.q_heads % options.kv_heads != 0) {
        return cpa_fail(err, CPA_INVALID, "bench: --q-heads: found %lld, expected a multiple of the %lld KV heads",
                        (long long)options.q_heads, (long long)options.kv_heads);
    }
    *out = options;
    *name = positional;
    return CPA_OK;
}

void cpa_bench_options_print_help(void) {
    for (int f = 0; f < N_FIELDS; f++) {
        char left[32];
        snprintf(left, sizeof left, "--%s %s", table[f].name, table[f].value_name ? table[f].value_name : "");
        printf("  %-17s %s", left, table[f].help);
        printf(table[f].initial[0] && table[f].type != CPA_FIELD_FLAG ? " [%s]\n" : "\n", table[f].initial);
    }
}

/* So that products of three numbers of a shape stay far from overflow in a double, and of two in an int64_t. */
#define LARGEST_COUNT ((int64_t)1 << 31)

/* Reads digits with an optional K, M or G from *text and moves it past them. */
static bool read_count(const char **text, int64_t *out) {
    char *end;
    if (**text < '0' || **text > '9') return false;
    errno = 0;
    long long value = strtoll(*text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (errno || value <= 0 || value > (LARGEST_COUNT >> shift)) return false;
    *out = (int64_t)value << shift;
    *text = end + (shift > 0);
    return true;
}

int cpa_bench_cases_parse(const char *list, int n_dims, cpa_bench_case *cases) {
    const char *text = list;
    for (int n = 0; n < CPA_BENCH_MAX_CASES; text++) {
        cpa_bench_case *one = &cases[n];
        const char *begin = text;
        for (int d = 0; d < n_dims; d++) {
            if (!read_count(&text, &one->shape[d])) return 0;
            if (d + 1 < n_dims && *text++ != 'x') return 0;
        }
        size_t length = (size_t)(text - begin);
        if ((*text && *text != ',') || length >= sizeof one->name) return 0;
        memcpy(one->name, begin, length);
        one->name[length] = 0;
        n++;
        if (!*text) return n;
    }
    return 0;
}
