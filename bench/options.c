#include "bench/options.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "base/check.h"
#include "bench/rules.h"
#include "comm/transports.h"
#include "program/names.h"

/* The dtypes by their number, and CPA_DTYPE_COUNT, or CPA_KV_DTYPE_COUNT, for none. */
static const char *const dtypes[] = {"fp32", "bf16", "fp16", "auto", NULL};
static const char *const kv_dtypes[] = {"fp32",    "bf16",    "fp16",    "fp8_e4m3", "int8",    "fp8_t128", "fp8_e5m2",
                                        "fp8_t64", "tq_k8v4", "tq_4bit", "tq_k3v4",  "tq_3bit", "auto",     NULL};
_Static_assert(sizeof dtypes / sizeof dtypes[0] == CPA_DTYPE_COUNT + 2, "a word for each dtype");
_Static_assert(sizeof kv_dtypes / sizeof kv_dtypes[0] == CPA_KV_DTYPE_COUNT + 2, "a word for each dtype of a cache");
static const char *const devices[] = {"auto", "host", "cuda", NULL};
const char *const cpa_bench_paths[] = {"best", "simple", "portable", "hopper", NULL};
static const char *const masks[] = {"causal", "full", NULL};
static const char *const page_orders[] = {"random", "ordered", NULL};
static const char *const algorithms[] = {"auto", "pass-kv", "pass-q", NULL};
static const char *const cascades[] = {"auto", "off", "always", NULL};
static const char *const layouts[] = {"token-major", "head-major", "vllm-x", NULL};
static const char *const patterns[] = {"rounds", "at-once", NULL};

/* The group of options that may also follow the numbers of a case. */
static const char CASE[] = "of a case";

#define INT_AT(member, least, most) CPA_FIELD_INT, offsetof(cpa_bench_options, member), .min = least, .max = most
#define CHOICE_AT(member, words) CPA_FIELD_CHOICE, offsetof(cpa_bench_options, member), .choices = words
#define FLAG_AT(member) CPA_FIELD_FLAG, offsetof(cpa_bench_options, member), .initial = "false"
#define TEXT_AT(member) CPA_FIELD_TEXT, offsetof(cpa_bench_options, member), .initial = ""
static const cpa_field table[] = {
    {NULL, "shapes", "LIST", TEXT_AT(shapes),
     .help = "cases, comma-separated; a number may end in K, M or G (powers of 1024)"},
    {NULL, "device", "NAME", CHOICE_AT(device, devices), .initial = "auto",
     .help = "auto (cuda where there is one), host or cuda"},
    {CASE, "dtype", "TYPE", CHOICE_AT(dtype, dtypes), .named = cpa_named_dtype, .initial = "auto",
     .help = "fp32, bf16 or fp16; auto: fp32 on the host, bf16 on cuda"},
    {CASE, "kv-cache-dtype", "TYPE", CHOICE_AT(kv_dtype, kv_dtypes), .named = cpa_named_dtype, .initial = "auto",
     .help = "of the KV cache, fp8_e4m3, fp8_e5m2 and int8 with a scale for each token and head, fp8_t128 and "
             "fp8_t64 of latents, tq_k8v4, tq_4bit, tq_k3v4 and tq_3bit TurboQuant's; auto: as --dtype"},
    {CASE, "tensor-scale", "S", CPA_FIELD_REAL, offsetof(cpa_bench_options, tensor_scale), .initial = "0", .max = 1e6,
     .help = "one scale for all keys and values of a cache in fp8_e4m3 or fp8_e5m2; 0: one for each token and head"},
    {CASE, "q-heads", "N", INT_AT(q_heads, 1, 1024), .initial = "auto", .word = "auto",
     .help = "query heads; auto: 8 on the host, 32 on cuda"},
    {CASE, "kv-heads", "N", INT_AT(kv_heads, 1, 1024), .initial = "auto", .word = "auto",
     .help = "key and value heads; auto: 2 on the host, 8 on cuda"},
    {CASE, "head-dim", "N", INT_AT(k_dim, 1, CPA_MAX_HEAD_DIM), .initial = "auto", .word = "auto",
     .help = "width of a head; auto: 128"},
    {CASE, "v-head-dim", "N", INT_AT(v_dim, 1, CPA_MAX_HEAD_DIM), .initial = "auto", .word = "auto",
     .help = "width of a value and result head; auto: as --head-dim"},
    {CASE, "v-in-k", NULL, FLAG_AT(v_in_k),
     .help = "attend, sparse: values are the first elements of keys, as those of latents: one KV head, 576 wide keys, "
             "512 of "
             "them values, where these are not given"},
    {CASE, "block-size", "N", INT_AT(block_size, 1, 4096), .initial = "auto", .word = "auto", .power_of_two = 1,
     .help = "tokens in a block of the KV cache; auto: 16 on the host, 64 on cuda"},
    {CASE, "mask", "NAME", CHOICE_AT(full, masks), .initial = "causal", .help = "attend: causal or full"},
    {CASE, "rules", "NAME", CHOICE_AT(rules, cpa_bench_rules), .initial = "none",
     .help = "attend: what is done to scores: softcap, temperature, alibi, sink-logits, bits, a causal mask, or "
             "tree, one of the new tokens alone"},
    {CASE, "pages", "ORDER", CHOICE_AT(pages_ordered, page_orders), .initial = "random",
     .help = "blocks lie in random order, or ordered, one after another"},
    {CASE, "layout", "NAME", CHOICE_AT(layout, layouts), .named = cpa_named_layout, .initial = "token-major",
     .help = "of the KV cache: token-major, head-major or vllm-x; attend, and kv_convert, which makes it token-major"},
    {CASE, "ragged", NULL, FLAG_AT(ragged), .help = "attend: sequence i has (i mod 8 + 1) / 8 of the context"},
    {CASE, "shared", "N", INT_AT(shared, 0, 0x1p31), .initial = "0",
     .help = "attend, step: the first N tokens of all sequences are the same, in the same blocks"},
    {CASE, "cascade-attention", "MODE", CHOICE_AT(cascade, cascades), .initial = "auto",
     .help = "attend, step: auto, where they are read once if that is faster; off; or always"},
    {CASE, "padded", NULL, FLAG_AT(padded), .help = "attend: plans as in graphs, whose launches stay the same"},
    {CASE, "ring-part", "N", INT_AT(ring_part, 1, 1 << 20), .initial = "8",
     .help = "offload: the ring has 1 / N of the cache's bytes, or the least if that is more"},
    {CASE, "density", "PERCENT", INT_AT(density, 0, 100), .initial = "0",
     .help = "offload: rows attend their own block of 128 keys, the first, and so many of the others; 0: all keys"},
    {CASE, "segments", "N", INT_AT(segments, 0, CPA_MOST_RING_SEGMENTS), .initial = "0",
     .help = "offload: segments of the ring; 0: as many as the library chooses"},
    {CASE, "skip-tiles", "T", CPA_FIELD_REAL, offsetof(cpa_bench_options, skip_tiles), .initial = "0", .max = 1000,
     .help = "attend: tiles of keys whose scores lie more than T below the largest so far are left out"},
    {CASE, "light-keys", "S", CPA_FIELD_REAL, offsetof(cpa_bench_options, light), .initial = "0", .max = 1,
     .help = "attend: the share S of the keys, in runs of 256, is so small that it cannot matter; scores are twice as "
             "large as without"},
    {CASE, "unit", "N", INT_AT(unit, 1, 4096), .initial = "1", .power_of_two = 1,
     .help = "sparse: neighbouring tokens that a list names together"},
    {CASE, "fp8-out", NULL, FLAG_AT(fp8_out), .help = "merge: the result in fp8_e4m3"},
    {CASE, "experts", "N", INT_AT(experts, 1, CPA_MOST_EXPERTS), .initial = "8", .help = "expert_linear: experts"},
    {CASE, "top-k", "N", INT_AT(top_k, 1, CPA_MOST_TOP_K), .initial = "8",
     .help = "expert_linear: experts that a token chooses"},
    {CASE, "fp8-weights", NULL, FLAG_AT(fp8_weights),
     .help = "expert_linear: weights in fp8_e4m3 with scales of blocks of 128 x 128"},
    {CASE, "as-one", NULL, FLAG_AT(as_one), .help = "varlen: the same work in one sequence instead"},
    {CASE, "length-scale", "S", CPA_FIELD_REAL, offsetof(cpa_bench_options, length_scale), .initial = "1", .min = 1e-9,
     .max = 1e6, .help = "varlen: multiplies the lengths of prompts"},
    {NULL, "trace", "FILE", TEXT_AT(trace),
     .help = "varlen: prompts as long as those of the trace, Mooncake format; without it, of a list of its own"},
    {CASE, "kernels", "NAME", CHOICE_AT(path, cpa_bench_paths), .initial = "best",
     .help = "attend on cuda: best, hopper, portable (no wgmma) or simple (no tensor cores)"},
    {CASE, "transport", "NAME", CHOICE_AT(transport, cpa_transport_names), .initial = "auto",
     .help = "exchange: auto (as the program chooses), host, nccl or peer"},
    {CASE, "pattern", "NAME", CHOICE_AT(at_once, patterns), .initial = "rounds",
     .help = "exchange: rounds, two in flight, or at-once, all peers in one"},
    {NULL, "context", "N", INT_AT(context, 1, 0x1p31), .initial = "4096",
     .help = "scaling without --shapes: tokens of the prefill"},
    {NULL, "batch", "N", INT_AT(batch, 1, 4096), .initial = "8",
     .help = "scaling without --shapes: sequences of the decode step"},
    {NULL, "decode-context", "N", INT_AT(decode_context, 1, 0x1p31), .initial = "auto", .word = "auto",
     .help = "scaling: tokens of each of them; auto: as --context"},
    {NULL, "ranks", "LIST", TEXT_AT(ranks),
     .help = "scaling: so many ranks, beside one, as in 2,4,8; the others wait; without it all"},
    {NULL, "interleave", "N", INT_AT(interleave, 1, 0x1p20), .initial = "auto", .word = "auto",
     .help = "scaling: tokens in a row that one rank owns; auto: the block size"},
    {NULL, "max-num-batched-tokens", "N", INT_AT(chunk, 1, 0x1p24), .initial = "auto", .word = "auto",
     .help = "scaling: new tokens of a step of a prefill; auto: all of them"},
    {NULL, "staging-bytes", "N", INT_AT(staging_bytes, 1, 0x1p40), .initial = "auto", .word = "auto",
     .help = "scaling: bound on the memory of one rank for keys and values on their way; auto: the library's"},
    {CASE, "algorithm", "NAME", CHOICE_AT(algorithm, algorithms), .initial = "auto",
     .help = "scaling: pass-kv or pass-q; auto: pass-q for one new token, pass-kv for more"},
    {CASE, "pass-q-share", "S", CPA_FIELD_REAL, offsetof(cpa_bench_options, pass_q_share), .initial = "0", .max = 1,
     .help = "scaling: the last S of the new tokens of a prefill by pass-q, whatever --algorithm says of the others"},
    {NULL, "threads", "N", INT_AT(threads, 1, 1024), .initial = "auto", .word = "auto",
     .help = "threads of a rank on the host; auto: what the program would use"},
    {NULL, "min-time", "S", CPA_FIELD_REAL, offsetof(cpa_bench_options, min_time_s), .initial = "0.5", .max = 3600,
     .help = "repeat each case for at least S seconds"},
    {NULL, "iters", "N", INT_AT(iterations, 1, CPA_BENCH_MAX_ITERATIONS), .initial = "auto", .word = "auto",
     .help = "time each case, or each step of one, N times, on a device N batches of calls; auto: as --min-time says"},
    {NULL, "result-json", "FILE", TEXT_AT(json),
     .help = "write the table to FILE as well; an older one becomes FILE.old"},
    {NULL, "help", NULL, FLAG_AT(help), .help = "print this text and stop"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

cpa_status cpa_bench_options_parse(int argc, char **argv, cpa_bench_options *out, const char **name, cpa_error *err) {
    cpa_bench_options options = {0};
    const char *positional = NULL;
    for (int f = 0; f < N_FIELDS; f++) CPA_TRY(cpa_field_set(&table[f], &options, "default", table[f].initial, err));
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' || positional) {
            const cpa_field *field;
            CPA_TRY(cpa_field_read_argument(table, N_FIELDS, "bench", argc, argv, &i, &options, &field, err));
        } else {
            positional = argv[i];
        }
    }
    *out = options;
    *name = positional;
    return CPA_OK;
}

cpa_status cpa_bench_options_resolve(cpa_bench_options *o, cpa_backend backend, cpa_error *err) {
    bool cuda = backend == CPA_BACKEND_CUDA;
    if (o->dtype == CPA_DTYPE_COUNT) o->dtype = cuda ? CPA_BF16 : CPA_F32;
    if (o->kv_dtype == CPA_KV_DTYPE_COUNT) o->kv_dtype = o->dtype;
    if (!o->q_heads) o->q_heads = cuda ? 32 : 8;
    if (!o->kv_heads) o->kv_heads = o->v_in_k ? 1 : cuda ? 8 : 2;
    if (!o->v_dim) o->v_dim = o->k_dim || !o->v_in_k ? o->k_dim : 512;
    if (!o->k_dim) o->k_dim = o->v_in_k ? 576 : 128;
    if (!o->v_dim) o->v_dim = o->k_dim;
    if (!o->block_size) o->block_size = cuda ? 64 : 16;
    if (!o->interleave) o->interleave = o->block_size;
    if (!o->decode_context) o->decode_context = o->context;
    if (o->tensor_scale > 0 && o->kv_dtype != CPA_FP8_E4M3 && o->kv_dtype != CPA_FP8_E5M2)
        return cpa_fail(err, CPA_INVALID,
                        "bench: --tensor-scale: found %g, expected 0 unless --kv-cache-dtype is fp8_e4m3 or fp8_e5m2",
                        o->tensor_scale);
    if (o->q_heads % o->kv_heads != 0) {
        return cpa_fail(err, CPA_INVALID, "bench: --q-heads: found %lld, expected a multiple of the %lld KV heads",
                        (long long)o->q_heads, (long long)o->kv_heads);
    }
    return CPA_OK;
}

cpa_attention_shape cpa_bench_shape(const cpa_bench_options *o) {
    return (cpa_attention_shape){.q_heads = (int32_t)o->q_heads,
                                 .kv_heads = (int32_t)o->kv_heads,
                                 .k_dim = (int32_t)o->k_dim,
                                 .v_dim = (int32_t)o->v_dim,
                                 .v_in_k = (int32_t)o->v_in_k,
                                 .dtype = (cpa_dtype)o->dtype,
                                 .kv_dtype = (cpa_dtype)o->kv_dtype,
                                 .layout = (cpa_kv_layout)o->layout,
                                 .k_scale = (float)o->tensor_scale,
                                 .v_scale = (float)o->tensor_scale};
}

float cpa_bench_scale(const cpa_bench_options *o) {
    if (o->light > 0) return 2 / sqrtf((float)o->k_dim); /* the others are the more peaky */
    return o->v_in_k ? 1 / sqrtf((float)o->k_dim) : 0;
}

bool cpa_bench_is_timed(const cpa_bench_options *options, int64_t n, double total_s, double min_s) {
    enum { MIN_BATCHES = 3 };
    if (options->iterations) return n >= options->iterations;
    return n == CPA_BENCH_MAX_ITERATIONS || (n >= MIN_BATCHES && total_s >= min_s);
}

void cpa_bench_options_print_help(void) {
    for (int f = 0; f < N_FIELDS; f++) {
        cpa_field_print_help(&table[f], table[f].type != CPA_FIELD_FLAG, stdout);
    }
    char text[512] = "a case may end in options of its own, as in 1x8Kx8K:head-dim=64:mask=full; of these:";
    for (int f = 0; f < N_FIELDS; f++) {
        size_t used = strlen(text);
        if (table[f].group == CASE) snprintf(text + used, sizeof text - used, " %s", table[f].name);
    }
    cpa_text_wrap(text, 0, 2, stdout);
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

/* Sets the options "name=value:name=value" of a case, `length` characters of text. */
static cpa_status read_case_options(const char *text, size_t length, cpa_bench_options *out, cpa_error *err) {
    const char *end = text + length;
    while (text < end) {
        size_t item = strcspn(text, ":,"), name = strcspn(text, "=:,");
        const cpa_field *field = cpa_field_find(table, N_FIELDS, text, name);
        char found[64], value[64];
        cpa_text_quote(text, item, found, sizeof found);
        if (!field || field->group != CASE || name == item || item - name >= sizeof value) {
            return cpa_fail(err, CPA_INVALID, "bench: --shapes: found '%s', expected an option of a case (see --help)",
                            found);
        }
        snprintf(value, sizeof value, "%.*s", (int)(item - name - 1), text + name + 1);
        char where[64];
        snprintf(where, sizeof where, "bench: --shapes: %s", field->name);
        const char *at = value;
        int64_t count;
        if (field->type == CPA_FIELD_INT && read_count(&at, &count) && !*at)
            snprintf(value, sizeof value, "%lld", (long long)count);
        CPA_TRY(cpa_field_set(field, out, where, value, err));
        text += item + (text + item < end);
    }
    return CPA_OK;
}

/* The numbers of a case, joined by x, and after a colon its options. */
static cpa_status read_case(const char *text, size_t length, int n_dims, cpa_bench_case *one, cpa_error *err) {
    const char *at = text;
    char found[96];
    bool right = length < sizeof one->name;
    for (int d = 0; right && d < n_dims; d++) {
        right = read_count(&at, &one->shape[d]) && (d + 1 == n_dims || *at++ == 'x');
    }
    if (right && at < text + length) right = *at++ == ':' && at < text + length;
    cpa_text_quote(text, length, found, sizeof found);
    if (!right) {
        return cpa_fail(err, CPA_INVALID, "bench: --shapes: found '%s', expected %d numbers, such as %s", found, n_dims,
                        n_dims == 1   ? "16K"
                        : n_dims == 2 ? "4Kx8"
                                      : "1x4Kx4K");
    }
    memcpy(one->name, text, length);
    one->name[length] = 0;
    return read_case_options(at, (size_t)(text + length - at), &one->options, err);
}

cpa_status cpa_bench_cases_parse(const char *list, int n_dims, const cpa_bench_options *options, cpa_backend backend,
                                 cpa_bench_case *cases, int *n_cases, cpa_error *err) {
    const char *text = list;
    for (int n = 0; n < CPA_BENCH_MAX_CASES; n++) {
        size_t length = strcspn(text, ",");
        cases[n].options = *options;
        CPA_TRY(read_case(text, length, n_dims, &cases[n], err));
        CPA_TRY(cpa_bench_options_resolve(&cases[n].options, backend, err));
        *n_cases = n + 1;
        if (!text[length]) return CPA_OK;
        text += length + 1;
    }
    return cpa_fail(err, CPA_INVALID, "bench: --shapes: more than %d cases", CPA_BENCH_MAX_CASES);
}
