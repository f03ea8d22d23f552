/* The command line of `cp_attn bench`. */
#ifndef CPA_BENCH_OPTIONS_H
#define CPA_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include <cpattn/device.h>

#include "program/field.h"

typedef struct cpa_bench_options {
    char shapes[CPA_TEXT_BYTES]; /* empty: the benchmark's own */
    int64_t device;              /* cpa_device_choice */
    int64_t dtype, kv_dtype;     /* cpa_dtype, of tensors and of the cache */
    int64_t q_heads, kv_heads, k_dim, v_dim, block_size, interleave;
    int64_t full;                           /* 0 causal, 1 without a mask */
    int64_t rules;                          /* of attend: cpa_bench_rule */
    int64_t pages_ordered;                  /* pages lie one after another; else in random order */
    int64_t ragged;                         /* sequence i has (i mod 8 + 1) / 8 of the context */
    int64_t shared;                         /* of attend: tokens that all sequences begin with */
    int64_t cascade;                        /* of attend: cpa_cascade_attention */
    int64_t padded;                         /* of attend: plans as graphs have them */
    int64_t layout;                         /* cpa_kv_layout */
    int64_t fp8_out;                        /* of merge: the result in fp8 */
    int64_t as_one;                         /* of varlen: the same work in one sequence */
    double length_scale;                    /* of varlen */
    char trace[CPA_TEXT_BYTES];             /* of varlen; empty: lengths of its own */
    int64_t path;                           /* index into cpa_bench_paths */
    int64_t transport;                      /* cpa_transport_kind */
    int64_t at_once;                        /* one exchange with all peers; else the rounds */
    int64_t context, batch, decode_context; /* of scaling */
    int64_t chunk;                          /* of scaling; 0: all new tokens */
    int64_t staging_bytes;                  /* of scaling; 0: the library's choice */
    double pass_q_share;                    /* of scaling: part of the new tokens of a prefill, the last */
    int64_t algorithm;                      /* of scaling: cpa_algorithm; CPA_AUTO: pass-Q for decode, else pass-KV */
    int64_t threads;                        /* 0: what the program would use */
    double min_time_s;                      /* a case is repeated for at least so long */
    int64_t iterations;                     /* 0: as min_time_s says */
    char json[CPA_TEXT_BYTES];              /* empty: no file */
    int64_t help;
} cpa_bench_options;

/* The choices of --kernels: the best one of the device, else a path of attend by name; NULL past the last. */
extern const char *const cpa_bench_paths[];

#define CPA_BENCH_MAX_ITERATIONS 100000

/* Fills *out from the command line; *name is the one argument that is no option, or NULL. What was not given waits for
 * cpa_bench_options_resolve. */
cpa_status cpa_bench_options_parse(int argc, char **argv, cpa_bench_options *out, const char **name, cpa_error *err);

/* Gives the options that were not given the defaults of the back end, and checks how they agree. */
cpa_status cpa_bench_options_resolve(cpa_bench_options *options, cpa_backend backend, cpa_error *err);

/* The attention that the options, resolved, ask for. */
cpa_attention_shape cpa_bench_shape(const cpa_bench_options *options);

/* Whether n batches, which took total_s, are as many as --iters asks for, or else enough for min_s seconds. */
bool cpa_bench_is_timed(const cpa_bench_options *options, int64_t n, double total_s, double min_s);

/* The options, for the help text. */
void cpa_bench_options_print_help(void);

#define CPA_BENCH_MAX_DIMS 3
#define CPA_BENCH_MAX_CASES 64

/* One case of a --shapes list: as written, its numbers, and its options. */
typedef struct cpa_bench_case {
    char name[256];
    int64_t shape[CPA_BENCH_MAX_DIMS];
    cpa_bench_options options;
} cpa_bench_case;

/* Parses "2x1Kx4K:block-size=16:ragged=true,...": n_dims numbers a case, which may end in K, M or G (powers of 1024),
 * then options that hold for this case alone. `options` are not resolved yet; those of the cases are. cases has
 * room for CPA_BENCH_MAX_CASES. */
cpa_status cpa_bench_cases_parse(const char *list, int n_dims, const cpa_bench_options *options, cpa_backend backend,
                                 cpa_bench_case *cases, int *n_cases, cpa_error *err);

#endif
