/* The command line of `cp_attn bench`. */
#ifndef CPA_LAUNCHER_BENCH_OPTIONS_H
#define CPA_LAUNCHER_BENCH_OPTIONS_H

#include <stdint.h>

#include <cpattn/status.h>

#include "launcher/field.h"

typedef struct cpa_bench_options {
    char shapes[CPA_TEXT_BYTES]; /* empty: the benchmark's own */
    int64_t dtype;               /* cpa_dtype */
    int64_t q_heads, kv_heads, head_dim, block_size;
    int64_t threads;           /* 0: what the program would use */
    double min_time_s;         /* a case is repeated for at least so long */
    int64_t iterations;        /* 0: as min_time_s says */
    char json[CPA_TEXT_BYTES]; /* empty: no file */
    int64_t help;
} cpa_bench_options;

#define CPA_BENCH_MAX_ITERATIONS 100000

/* Fills *out from the defaults and the command line; *name is the one argument that is no option, or NULL. */
cpa_status cpa_bench_options_parse(int argc, char **argv, cpa_bench_options *out, const char **name, cpa_error *err);

/* The options, for the help text. */
void cpa_bench_options_print_help(void);

#define CPA_BENCH_MAX_DIMS 3
#define CPA_BENCH_MAX_CASES 64

/* One case of a --shapes list, as written and as numbers. */
typedef struct cpa_bench_case {
    char name[48];
    int64_t shape[CPA_BENCH_MAX_DIMS];
} cpa_bench_case;

/* Parses "2x1Kx4K,..." with n_dims numbers a case; a number may end in K, M or G (powers of 1024). Returns the number of
 * cases, or 0 if the list is malformed or longer than CPA_BENCH_MAX_CASES. */
int cpa_bench_cases_parse(const char *list, int n_dims, cpa_bench_case *cases);

#endif
