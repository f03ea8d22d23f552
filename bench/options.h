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
    double tensor_scale;        /* of an fp8_e4m3 cache; 0: each token and head has its own */
    int64_t unit;               /* neighbouring tokens that sparse chooses together */
    int64_t v_in_k;             /* 1: values are the first elements of keys, as those of latents */
    int64_t full;               /* 0 causal, 1 without a mask */
    int64_t rules;              /* cpa_bench_rule, for attend */
    int64_t pages_ordered;      /* pages lie one after another; else in random order */
    int64_t ragged;             /* sequence i has (i mod 8 + 1) / 8 of the context */
    int64_t shared;             /* tokens that all sequences begin with, for attend */
    int64_t cascade;            /* cpa_cascade_attention, for attend */
    int64_t padded;             /* 1: attend plans as graphs have them */
    double skip_tiles;          /* of attend; 0: no tile of keys is left out */
    double light;               /* share of the runs of keys that are light, for attend (src/check/cases/inputs.h) */
    int64_t density;            /* offload: percent of the blocks of 128 keys that rows select; 0: rows attend all */
    int64_t ring_part;          /* offload: the ring is 1 / ring_part of the cache */
    int64_t segments;           /* offload: of the ring; 0: as many as the library chooses */
    int64_t layout;             /* cpa_kv_layout */
    int64_t fp8_out;            /* 1: merge gives its result in fp8 */
    int64_t experts, top_k;     /* experts of expert_linear, and how many a token chooses */
    int64_t fp8_weights;        /* 1: weights of expert_linear are in fp8 */
    int64_t as_one;             /* 1: varlen puts its work in one sequence */
    double length_scale;        /* factor of the lengths of varlen's trace */
    char trace[CPA_TEXT_BYTES]; /* file with the lengths of varlen; empty: lengths of its own */
    int64_t path;               /* index into cpa_bench_paths */
    int64_t transport;          /* cpa_transport_kind */
    int64_t at_once;            /* one exchange with all peers; else the rounds */
    int64_t context, batch,
        decode_context;         /* scaling: tokens of the prefill; sequences of the decode step; tokens of each */
    int64_t chunk;              /* new tokens of a chunk of scaling; 0: all */
    int64_t staging_bytes;      /* bound of staging in scaling; 0: the library's choice */
    char ranks[CPA_TEXT_BYTES]; /* list of numbers of ranks in scaling; empty: all */
    double pass_q_share;        /* share of the new tokens of a prefill of scaling, the last ones, that go by pass-Q */
    int64_t algorithm;          /* cpa_algorithm of scaling; CPA_AUTO: pass-Q for decode, else pass-KV */
    int64_t threads;            /* 0: what the program would use */
    double min_time_s;          /* a case is repeated for at least so long */
    int64_t iterations;         /* 0: as min_time_s says */
    char json[CPA_TEXT_BYTES];  /* empty: no file */
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

/* The scale of scores; 0 stands for 1 / sqrt(k_dim), which keys that hold their values have to be told. */
float cpa_bench_scale(const cpa_bench_options *options);

/* Whether n batches, which took total_s, are as many as --iters asks for, or else enough for min_s seconds. */
bool cpa_bench_is_timed(const cpa_bench_options *options, int64_t n, double total_s, double min_s);

/* The options, for the help text. */
void cpa_bench_options_print_help(void);

#define CPA_BENCH_MAX_DIMS 5
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
