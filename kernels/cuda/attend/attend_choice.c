#include "kernels/cuda/attend/attend_choice.h"

/* ALiBi is divided by the scale of scores in prefill. */
static const float LEAST_SLOPED_SCALE = 0x1p-100f;

static int aligned(const void *pointer, uintptr_t bytes) {
    return (uintptr_t)pointer % bytes == 0;
}

static int in_runs(const cpa_cuda_attend_args *a) {
    return a->k_run_shift < 30;
}

static int in_small_blocks(const cpa_cuda_attend_args *a) {
    return 1 << a->block_shift < CPA_CUDA_DECODE_RUN;
}

/* The kernels on tensor cores move 8 elements of the inputs (16 codes) and 4 of the state at a time. */
static int inputs_aligned(const cpa_cuda_attend_args *a) {
    const int64_t widths = a->k_dim | a->v_dim;
    const int64_t strides = a->k_block_stride | a->k_token_stride | a->k_head_stride | a->v_block_stride |
                            a->v_token_stride | a->v_head_stride | widths;
    const int quantised = cpa_dtype_is_quantised(a->kv_dtype);
    const int keys =
        in_runs(a) ? widths % 8 == 0 && (a->k_block_stride | a->v_block_stride) * cpa_dtype_bytes(a->kv_dtype) % 16 == 0
                   : strides % (quantised ? 16 : 8) == 0;
    return keys && a->q_row_stride % (quantised && !in_runs(a) ? 16 : 8) == 0 && a->o_row_stride % 4 == 0 &&
           aligned(a->q, 16) && aligned(a->ready_q, 16) && aligned(a->k, 16) && aligned(a->v, 16) &&
           aligned(a->out, 16) && aligned(a->o, 16);
}

/* The widest heads of the Hopper kernel have no registers for scales of keys beside rules; those of 192 columns have their
 * tiles then. */
static int scales_fit(const cpa_cuda_attend_args *a) {
    return !cpa_dtype_is_quantised(a->kv_dtype) || !a->score.any || (a->k_dim <= 128 && a->v_dim <= 128);
}

/* Why rows in runs are taken by no tensor cores. The plan has work for the decode kernels alone, or room for other rows
 * in one piece; those of codes have scales of their keys apart, which the Hopper kernel alone knows. */
static const char *runs_refused(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int quantised = cpa_dtype_is_quantised(a->kv_dtype);
    if (!spec->knows_runs) return "rows in runs of which the plan was not told";
    if (quantised && a->kv_dtype != CPA_FP8_E4M3) return "codes of rows in runs other than fp8_e4m3";
    if (in_small_blocks(a)) return "rows in runs in blocks of fewer than 16 tokens";
    if (!spec->has_prefill) return NULL;
    if (!spec->has_widened) return "no memory, or heads too wide, to widen blocks for prefill";
    if (quantised && spec->path != CPA_CUDA_HOPPER) return "prefill over codes of rows in runs before 9.0";
    if (quantised && !scales_fit(a)) return "score rules in prefill over codes of rows in runs of wide heads";
    return quantised && a->score.bias.values ? "a bias of scores in prefill over codes of rows in runs" : NULL;
}

/* Why rows share keys in no kernel on tensor cores: a bias is read element by element, in more code than the Hopper kernel
 * has registers for. */
static const char *shared_refused(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int rows_fit = spec->has_widened || (a->kv_dtype == a->q_dtype && !in_runs(a));
    if (!spec->has_shared) return NULL;
    if (spec->path != CPA_CUDA_HOPPER || !rows_fit) return "keys that rows share, of a cache that is not widened";
    if (!scales_fit(a)) return "score rules over keys that rows share, of codes of wide heads";
    return a->score.bias.values ? "a bias of scores over keys that rows share" : NULL;
}

/* Why no kernel on tensor cores takes the call. */
static const char *refused(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int quantised = cpa_dtype_is_quantised(a->kv_dtype), has_slopes = a->score.alibi_slopes != NULL;
    if (spec->path == CPA_CUDA_SIMPLE) return "a device without their instructions";
    if (a->q_dtype != CPA_BF16 && a->q_dtype != CPA_F16) return "queries that are neither bf16 nor fp16";
    if (a->kv_dtype != a->q_dtype && !quantised) return "a cache of another dtype than the queries";
    if (!(a->scale > 0)) return "a scale that is not positive"; /* the largest raw score is the largest scaled one */
    if (!inputs_aligned(a)) return "q, k, v, out or state.o off 16 bytes, or widths or strides off 8 elements";
    if (!spec->wide_fits) return "heads too wide for the shared memory of a CTA";
    if (a->out_scale && spec->path != CPA_CUDA_HOPPER) return "results in fp8 before 9.0";
    if (has_slopes && a->score.pre_scale < LEAST_SLOPED_SCALE) return "ALiBi beside a scale below 2^-100";
    if (a->score.any && spec->path != CPA_CUDA_HOPPER && (quantised || in_small_blocks(a) || in_runs(a)))
        return "score rules over this cache before 9.0";
    if (in_runs(a)) {
        const char *why = runs_refused(spec, a);
        if (why) return why;
    }
    return shared_refused(spec, a);
}

static cpa_cuda_attend_kernel choose_decode(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int others = cpa_dtype_is_quantised(a->kv_dtype) || in_small_blocks(a) || in_runs(a);
    if (spec->path == CPA_CUDA_HOPPER && cpa_cuda_decode_takes_blocks(a)) return CPA_CUDA_DECODE_BLOCKS;
    if (!a->score.any) return CPA_CUDA_DECODE;
    return others ? CPA_CUDA_DECODE_RULED_CACHES : CPA_CUDA_DECODE_RULED;
}

/* Whether the kernel with CTAs that stay takes these. Rows are counted in 32 bits by maps, and strides below 2^40 bytes. It
 * gains where pieces begin and end. In between its two warpgroups take 1 - 3% longer than those of a CTA a piece (H200),
 * which are better where pieces have many keys; of the three for narrow heads that is not so. */
static int persistent_fits(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int64_t most_keys = 12 << 10, keys = a->mask.causal ? spec->most_keys / 2 : spec->most_keys;
    const int flat = 1 << a->block_shift == CPA_TENSOR_BLOCK, narrow = a->k_dim <= 64 && a->v_dim <= 64;
    return cpa_cuda_persistent_fits(a) && spec->rows <= INT32_MAX && a->q_row_stride <= INT32_MAX &&
           (flat || narrow || keys <= most_keys);
}

static cpa_cuda_attend_kernel choose_prefill(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *a) {
    const int quantised = cpa_dtype_is_quantised(a->kv_dtype), ruled = a->score.any;
    const int32_t block_size = 1 << a->block_shift;
    /* With rules it takes smaller pieces of some heads than the plan has of tensors without pages. */
    const int fits = spec->tile_rows <= cpa_cuda_hopper_rows(a->k_dim, a->v_dim, block_size, ruled);
    const int hopper = spec->path == CPA_CUDA_HOPPER && spec->has_blocks && !a->score.bias.values && fits;
    if (in_runs(a)) return hopper ? CPA_CUDA_WIDENED_BOXES : CPA_CUDA_WIDENED_MMA;
    if (hopper && !quantised) return persistent_fits(spec, a) ? CPA_CUDA_PERSISTENT : CPA_CUDA_BOXES;
    if (hopper && spec->has_widened && scales_fit(a)) return CPA_CUDA_WIDENED_BOXES;
    return quantised && ruled ? CPA_CUDA_MMA_RULED_CODES : CPA_CUDA_MMA;
}

cpa_cuda_attend_choice cpa_cuda_choose_attend(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *args) {
    cpa_cuda_attend_choice choice = {.why = refused(spec, args)};
    if (choice.why) {
        choice.decode = spec->has_decode ? CPA_CUDA_PLAIN : CPA_CUDA_NO_KERNEL;
        choice.prefill = spec->has_prefill ? CPA_CUDA_PLAIN : CPA_CUDA_NO_KERNEL;
        choice.shared = spec->has_shared ? CPA_CUDA_PLAIN : CPA_CUDA_NO_KERNEL;
        return choice;
    }
    if (spec->has_decode) choice.decode = choose_decode(spec, args);
    if (spec->has_prefill) choice.prefill = choose_prefill(spec, args);
    if (spec->has_shared) choice.shared = spec->has_widened ? CPA_CUDA_WIDENED_BOXES : CPA_CUDA_BOXES;
    return choice;
}

const char *cpa_cuda_attend_kernel_name(cpa_cuda_attend_kernel kernel) {
    static const char *const names[] = {
        [CPA_CUDA_NO_KERNEL] = "-",
        [CPA_CUDA_PLAIN] = "simple",
        [CPA_CUDA_DECODE] = "decode",
        [CPA_CUDA_DECODE_BLOCKS] = "decode_blocks",
        [CPA_CUDA_DECODE_RULED] = "decode_ruled",
        [CPA_CUDA_DECODE_RULED_CACHES] = "decode_ruled_caches",
        [CPA_CUDA_PERSISTENT] = "persistent",
        [CPA_CUDA_BOXES] = "hopper",
        [CPA_CUDA_WIDENED_BOXES] = "widen+hopper",
        [CPA_CUDA_MMA] = "portable",
        [CPA_CUDA_WIDENED_MMA] = "widen+portable",
        [CPA_CUDA_MMA_RULED_CODES] = "portable_ruled_codes",
    };
    return names[kernel];
}
