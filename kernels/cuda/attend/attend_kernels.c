/* The table, how it is asked, and its rows for whose launches nothing is prepared. */
#include "kernels/cuda/attend/attend_kernels.h"

#define REFERENCE(id) &cpa_cuda_kernel_##id,
const cpa_cuda_attend_kernel *const cpa_cuda_attend_kernels[] = {CPA_CUDA_ATTEND_KERNELS(REFERENCE) NULL};

/* What is asked of scores that a kernel does not know. */
static const char *unknown_rules(const cpa_cuda_attend_kernel *kernel, int32_t rules) {
    if (rules & CPA_CUDA_BLOCKS) return "keys by blocks";
    if (kernel->takes.rules & CPA_CUDA_BLOCKS) return "score rules beside keys by blocks";
    if (kernel->takes.rules & CPA_CUDA_LISTS) return "score rules beside keys by lists";
    return kernel->takes.rules & CPA_CUDA_BITS ? "a bias of scores" : "score rules";
}

/* What no kernel on tensor cores takes. */
static const char *tensor_cores_refuse(const cpa_cuda_attend_spec *spec) {
    const cpa_cuda_attend_call *call = &spec->call;
    const int hopper = call->path == CPA_CUDA_HOPPER, small_blocks = spec->block_size < CPA_CUDA_DECODE_RUN;
    const int codes = cpa_cuda_has_codes(spec), runs = cpa_cuda_in_runs(spec), odd = call->oddities;
    if (call->path == CPA_CUDA_SIMPLE) return "a device without their instructions";
    if (call->q_dtype != CPA_BF16 && call->q_dtype != CPA_F16) return "queries that are neither bf16 nor fp16";
    if (call->kv_dtype != call->q_dtype && !codes) return "a cache of another dtype than the queries";
    if (odd & CPA_CUDA_SCALE_BELOW_0) return "a scale that is not positive";
    if (odd & CPA_CUDA_UNALIGNED) return "q, k, v, out or state.o off 16 bytes, or widths or strides off 8 elements";
    if (spec->no_memory) return "heads too wide for the shared memory of a CTA";
    if (odd & CPA_CUDA_OUT_CODES && !hopper) return "results in fp8 before 9.0";
    if (call->rules & CPA_CUDA_ALIBI && odd & CPA_CUDA_SCALE_TINY) return "ALiBi beside a scale below 2^-100";
    if (call->rules & CPA_CUDA_ALL_RULES && !hopper && (codes || small_blocks || runs))
        return "score rules over this cache before 9.0";
    if (!runs) return NULL;
    if (spec->shape->layout != CPA_VLLM_X) return "rows in runs of which the plan was not told";
    if (codes && call->kv_dtype != CPA_FP8_E4M3) return "codes of rows in runs other than fp8_e4m3";
    return small_blocks ? "rows in runs in blocks of fewer than 16 tokens" : NULL;
}

const char *cpa_cuda_kernel_refuses(const cpa_cuda_attend_kernel *kernel, const cpa_cuda_attend_spec *spec) {
    const char *why = NULL;
    if (kernel->takes.path == CPA_CUDA_SIMPLE) return NULL;
    if (kernel->over) {
        why = cpa_cuda_kernel_refuses(kernel->over, spec);
        if (!why && cpa_cuda_has_codes(spec) && spec->width >= CPA_CUDA_256) why = "codes of heads so wide";
        if (!why && !spec->prepared) why = "keys that there is no memory to widen in, or the plan was not told of";
    } else {
        const int as_it_lies = (kernel->takes.caches & spec->call.cache) != 0;
        why = tensor_cores_refuse(spec);
        const int widens = (kernel->takes.rules & CPA_CUDA_BLOCKS) != 0;
        if (!why && as_it_lies && !widens && spec->call.kv_dtype == CPA_FP8_E5M2)
            why = "codes of fp8_e5m2 that nothing widens";
    }
    if (why) return why;
    if (spec->call.path < kernel->takes.path) return "a device before 9.0";
    const int32_t unknown = spec->call.rules & ~kernel->takes.rules;
    if (unknown) return unknown_rules(kernel, unknown);
    if (spec->width > kernel->takes.width)
        return kernel->takes.width < CPA_CUDA_256 ? "heads of more than 128 columns" : "heads of more than 256 columns";
    return kernel->refuses ? kernel->refuses(spec) : NULL;
}

static cpa_cuda_chosen choose(const cpa_cuda_attend_spec *spec, cpa_cuda_pieces pieces) {
    cpa_cuda_chosen chosen = {0};
    for (int i = 0; cpa_cuda_attend_kernels[i]; i++) {
        const cpa_cuda_attend_kernel *kernel = chosen.kernel = cpa_cuda_attend_kernels[i];
        if (!(kernel->takes.pieces & 1 << pieces) || !(kernel->takes.caches & spec->call.cache)) continue;
        if (kernel->takes.path != CPA_CUDA_SIMPLE && kernel->takes.latents != spec->shape->v_in_k) continue;
        if (kernel->takes.path != CPA_CUDA_SIMPLE && (kernel->takes.rules ^ spec->call.rules) & CPA_CUDA_LISTS)
            continue;
        if (kernel->takes.rules & ~spec->call.rules & CPA_CUDA_BLOCKS && kernel->takes.path != CPA_CUDA_SIMPLE)
            continue;
        if (spec->width < kernel->takes.narrowest) continue;
        if (kernel->takes.skips && !(spec->call.oddities & CPA_CUDA_TILES_SKIP)) continue;
        const char *why = cpa_cuda_kernel_refuses(kernel, spec);
        if (!chosen.fastest) chosen.fastest = kernel, chosen.why = why;
        if (!why) break;
    }
    return chosen;
}

cpa_cuda_attend_choice cpa_cuda_choose_attend(const cpa_cuda_attend_spec *spec) {
    cpa_cuda_attend_choice choice = {.spec = *spec};
    for (int i = 0; i < CPA_CUDA_PIECE_KINDS; i++) {
        if (spec->pieces & 1 << i) choice.of[i] = choose(spec, (cpa_cuda_pieces)i);
        if (choice.of[i].kernel == &cpa_cuda_kernel_simple) choice.plain = choice.of[i].why;
    }
    for (int i = 0; i < CPA_CUDA_PIECE_KINDS && choice.plain; i++) {
        if (!choice.of[i].kernel) continue;
        choice.of[i].kernel = &cpa_cuda_kernel_simple;
        choice.of[i].why = choice.plain;
    }
    return choice;
}

/* ---- rows ---- */

enum { OF_DECODE = 1 << CPA_CUDA_DECODE, OF_PREFILL = 1 << CPA_CUDA_PREFILL, OF_SHARED = 1 << CPA_CUDA_SHARED };

static const char *decode_blocks_refuses(const cpa_cuda_attend_spec *spec) {
    if ((spec->shape->k_dim | spec->shape->v_dim) % 16 != 0) return "heads off 16 columns";
    return spec->call.oddities & CPA_CUDA_PARTED_BLOCKS ? "blocks off 16 bytes, or of 4 GiB and more" : NULL;
}

static const char *decode_skip_refuses(const cpa_cuda_attend_spec *spec) {
    if (spec->width < CPA_CUDA_128) return "heads of 64 columns and fewer";
    return spec->row_tiles > 1 ? "more than 16 rows of a KV head" : NULL;
}

static const char *decode_packed_refuses(const cpa_cuda_attend_spec *spec) {
    if (spec->shape->k_dim != 128 || spec->shape->v_dim != 128) return "heads of other than 128 columns";
    if (spec->block_size < CPA_CUDA_DECODE_RUN) return "blocks of fewer than 16 tokens";
    return spec->call.oddities & CPA_CUDA_ODD_ROWS ? "rows, or their scales, at distances off 16 bytes" : NULL;
}

static const char *portable_refuses(const cpa_cuda_attend_spec *spec) {
    return spec->call.rules && cpa_cuda_has_codes(spec) ? "score rules over codes" : NULL;
}

static const char *portable_ruled_codes_refuses(const cpa_cuda_attend_spec *spec) {
    return spec->call.rules ? NULL : "scores without rules";
}

static cpa_cuda_attend_geometry portable_geometry(const cpa_attention_shape *shape, int32_t block_size) {
    (void)shape, (void)block_size;
    return (cpa_cuda_attend_geometry){.rows = CPA_CUDA_PREFILL_ROWS, .heads = 1, .ctas = 1};
}

const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_blocks = {
    .name = "decode_blocks",
    .takes = {OF_DECODE, CPA_CUDA_RUNS | CPA_CUDA_RUN_CODES, 0, CPA_CUDA_HOPPER, CPA_CUDA_128},
    .refuses = decode_blocks_refuses,
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_blocks,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode = {
    .name = "decode",
    .takes = {OF_DECODE, CPA_CUDA_ALL_CACHES - CPA_CUDA_TURBOQUANT, 0, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_skip = {
    .name = "decode_skip",
    .takes = {.pieces = OF_DECODE,
              .caches = CPA_CUDA_ELEMENTS,
              .path = CPA_CUDA_PORTABLE,
              .width = CPA_CUDA_128,
              .skips = 1},
    .refuses = decode_skip_refuses,
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_skip,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_ruled = {
    .name = "decode_ruled",
    .takes = {OF_DECODE, CPA_CUDA_ELEMENTS, CPA_CUDA_ALL_RULES, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_ruled,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_ruled_caches = {
    .name = "decode_ruled_caches",
    .takes = {OF_DECODE, CPA_CUDA_ALL_CACHES - CPA_CUDA_ELEMENTS - CPA_CUDA_TURBOQUANT, CPA_CUDA_ALL_RULES,
              CPA_CUDA_HOPPER, CPA_CUDA_256},
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_ruled_caches,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_packed = {
    .name = "decode_packed",
    .takes = {OF_DECODE, CPA_CUDA_TURBOQUANT | CPA_CUDA_CODES, 0, CPA_CUDA_HOPPER, CPA_CUDA_128,
              .narrowest = CPA_CUDA_128},
    .refuses = decode_packed_refuses,
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_packed,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_decode_turboquant = {
    .name = "decode_turboquant",
    .takes = {OF_DECODE, CPA_CUDA_TURBOQUANT, CPA_CUDA_ALL_RULES, CPA_CUDA_HOPPER, CPA_CUDA_128},
    .geometry = cpa_cuda_decode_geometry,
    .launch = cpa_cuda_attend_decode_turboquant,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_portable = {
    .name = "portable",
    .takes = {OF_PREFILL, CPA_CUDA_ROWS | CPA_CUDA_CODES, CPA_CUDA_ALL_RULES, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .refuses = portable_refuses,
    .geometry = portable_geometry,
    .launch = cpa_cuda_attend_portable,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_portable_ruled_codes = {
    .name = "portable_ruled_codes",
    .takes = {OF_PREFILL, CPA_CUDA_CODES, CPA_CUDA_ALL_RULES, CPA_CUDA_HOPPER, CPA_CUDA_256},
    .refuses = portable_ruled_codes_refuses,
    .geometry = portable_geometry,
    .launch = cpa_cuda_attend_portable_ruled_codes,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_simple = {
    .name = "simple",
    .takes = {OF_DECODE | OF_PREFILL | OF_SHARED, CPA_CUDA_ALL_CACHES,
              CPA_CUDA_ALL_RULES | CPA_CUDA_LISTS | CPA_CUDA_BLOCKS, CPA_CUDA_SIMPLE, CPA_CUDA_576},
    .geometry = portable_geometry,
    .launch = cpa_cuda_attend_simple,
};
