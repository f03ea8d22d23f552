/* What a plan has its attends run: the class of a call, and the kernels that were chosen for it, which the plan keeps. */
#include <string.h>

#include "base/min_max.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_split.h"

static int aligned(const void *pointer, uintptr_t bytes) {
    return (uintptr_t)pointer % bytes == 0;
}

/* The kernels on tensor cores move 8 elements of the inputs (16 codes) and 4 of the state at a time; rows of CPA_TQ_ may
 * begin anywhere. */
static int inputs_aligned(const cpa_cuda_attend_args *a, int in_runs) {
    const int64_t widths = a->k_dim | a->v_dim;
    const int64_t strides = a->k_block_stride | a->k_token_stride | a->k_head_stride | a->v_block_stride |
                            a->v_token_stride | a->v_head_stride | widths;
    const int chunk = cpa_dtype_is_quantised(a->kv_dtype) && !in_runs ? 16 : 8;
    const int keys =
        in_runs ? widths % 8 == 0 && (a->k_block_stride | a->v_block_stride) * cpa_dtype_bytes(a->kv_dtype) % 16 == 0
                : strides % chunk == 0;
    return (cpa_dtype_is_turboquant(a->kv_dtype) || (keys && aligned(a->k, 16) && aligned(a->v, 16))) &&
           (a->q_row_stride | a->q_head_stride) % chunk == 0 && a->o_row_stride % 4 == 0 &&
           (a->out_row_stride | a->out_head_stride) % 8 == 0 && aligned(a->q, 16) && aligned(a->ready_q, 16) &&
           aligned(a->out, 16) && aligned(a->o, 16);
}

static int blocks_are_whole(const cpa_cuda_attend_args *a) {
    const int64_t strides = a->k_block_stride | a->k_head_stride | a->v_block_stride | a->v_head_stride;
    const int64_t bytes = cpa_dtype_bytes(a->kv_dtype), most = cpa_max64(a->k_block_stride, a->v_block_stride);
    return strides * bytes % 16 == 0 && most * bytes <= UINT32_MAX && (a->k_words_at | a->v_words_at) % 16 == 0;
}

/* Within a block and from block to block, and their scales. */
static int rows_are_even(const cpa_cuda_attend_args *a) {
    const int64_t strides = a->k_block_stride | a->k_token_stride | a->v_block_stride | a->v_token_stride;
    const int64_t bytes = cpa_dtype_bytes(a->kv_dtype), most = cpa_max64(a->k_token_stride, a->v_token_stride);
    const int64_t blocks = cpa_max64(a->k_block_stride, a->v_block_stride);
    return strides * bytes % 16 == 0 && most * bytes < 64 << 20 && blocks * bytes <= UINT32_MAX &&
           (a->k_words_at | a->v_words_at) % 16 == 0;
}

static cpa_cuda_cache cache_of(cpa_dtype dtype, int in_runs, int32_t block_size) {
    const int codes = cpa_dtype_is_quantised(dtype);
    if (cpa_dtype_is_turboquant(dtype)) return CPA_CUDA_TURBOQUANT;
    if (in_runs) return codes ? CPA_CUDA_RUN_CODES : CPA_CUDA_RUNS;
    if (codes) return CPA_CUDA_CODES;
    return block_size < CPA_CUDA_DECODE_RUN ? CPA_CUDA_ELEMENTS_APART : CPA_CUDA_ELEMENTS;
}

static int32_t rules_of(const cpa_cuda_score *score, const cpa_key_selection *selection) {
    return (score->softcap > 0 ? CPA_CUDA_SOFTCAP : 0) | (score->temperature_len > 0 ? CPA_CUDA_TEMPERATURE : 0) |
           (score->alibi_slopes ? CPA_CUDA_ALIBI : 0) | (score->custom.bits ? CPA_CUDA_BITS : 0) |
           (score->bias.values ? CPA_CUDA_BIAS : 0) | (selection && selection->indices ? CPA_CUDA_LISTS : 0) |
           (selection && selection->blocks ? CPA_CUDA_BLOCKS : 0);
}

static int32_t oddities_of(const cpa_cuda_attend_args *a, const cpa_kv_view *kv, int in_runs) {
    const float least_sloped = 0x1p-100f, scale = a->score.pre_scale;
    return (inputs_aligned(a, in_runs) ? 0 : CPA_CUDA_UNALIGNED) | (blocks_are_whole(a) ? 0 : CPA_CUDA_PARTED_BLOCKS) |
           (kv->num_blocks > 0 ? 0 : CPA_CUDA_NO_BLOCKS) |
           ((a->q_row_stride | a->q_head_stride) > INT32_MAX ? CPA_CUDA_FAR_ROWS : 0) |
           (scale > 0 ? 0 : CPA_CUDA_SCALE_BELOW_0) | (scale < least_sloped ? CPA_CUDA_SCALE_TINY : 0) |
           (!a->out || a->o || a->resume ? CPA_CUDA_STATE : 0) | (a->resume ? CPA_CUDA_RESUMED : 0) |
           (a->out_scale ? CPA_CUDA_OUT_CODES : 0) | (a->mask.window > 0 && a->mask.sinks > 0 ? CPA_CUDA_GAP : 0) |
           (a->mask.causal ? 0 : CPA_CUDA_FULL) | (a->k_words_at ? CPA_CUDA_ROW_SCALES : 0) |
           (rows_are_even(a) ? 0 : CPA_CUDA_ODD_ROWS);
}

cpa_cuda_attend_call cpa_cuda_call_of(cpa_cuda_path path, const cpa_cuda_attend_args *a, const cpa_kv_view *kv,
                                      const cpa_key_selection *selection) {
    const int in_runs = a->k_run_shift < CPA_KV_ONE_RUN;
    return (cpa_cuda_attend_call){path,
                                  a->q_dtype,
                                  a->kv_dtype,
                                  cache_of(a->kv_dtype, in_runs, kv->block_size),
                                  rules_of(&a->score, selection),
                                  oddities_of(a, kv, in_runs)};
}

cpa_cuda_attend_call cpa_cuda_planned_call(const cpa_device *device, const cpa_attention_shape *shape,
                                           int32_t block_size, cpa_attend_fusion fusion) {
    const int in_runs = shape->layout == CPA_VLLM_X, codes = cpa_dtype_is_quantised(shape->kv_dtype);
    const int off = (shape->k_dim | shape->v_dim) % (codes && !in_runs ? 16 : 8) != 0;
    const int row_scales = cpa_kv_scale_bytes(shape->kv_dtype, CPA_KEYS, cpa_shape_tensor_scale(shape, CPA_KEYS)) != 0;
    const int of_tensors = block_size == CPA_TENSOR_BLOCK; /* of which a plan is told no dtype */
    return (cpa_cuda_attend_call){
        ((const cpa_cuda_device *)device)->path,
        of_tensors ? CPA_BF16 : shape->dtype,
        of_tensors ? CPA_BF16 : shape->kv_dtype,
        cache_of(shape->kv_dtype, in_runs, block_size),
        fusion.masked ? CPA_CUDA_BITS : 0,
        (off ? CPA_CUDA_UNALIGNED : 0) | (fusion.full ? CPA_CUDA_FULL : 0) | (row_scales ? CPA_CUDA_ROW_SCALES : 0)};
}

static cpa_cuda_attend_spec spec_of(const cpa_cuda_plan *plan, const cpa_cuda_attend_call *call) {
    const cpa_attention_shape *shape = &plan->base.shape;
    const int64_t element_bytes = cpa_dtype_is_quantised(call->kv_dtype) ? 1 : 2; /* that kernels of decode take */
    return (cpa_cuda_attend_spec){
        .call = *call,
        .shape = shape,
        .block_size = plan->base.block_size,
        .width = cpa_cuda_width_of(shape->k_dim, shape->v_dim),
        .heads = cpa_cuda_decode_heads(shape, element_bytes),
        .pieces = (plan->decode_ctas > 0) << CPA_CUDA_DECODE | (plan->prefill.n_pieces > 0) << CPA_CUDA_PREFILL |
                  (plan->n_shared > 0) << CPA_CUDA_SHARED,
        .prepared = plan->n_places > 0,
        .reserved = plan->base.reservation.sequences > 0,
        .cp_size = plan->map.cp_size,
        .tile_rows = plan->tile_rows,
        .row_tiles = plan->decode_row_tiles,
        .rows = plan->base.rows,
        .most_keys = plan->most_keys,
    };
}

/* For wide heads the kernels take more shared memory than some devices have for a CTA. */
static int shared_memory_suffices(const cpa_cuda_plan *plan, const cpa_cuda_attend_choice *choice) {
    cpa_stream nowhere = {.device = plan->base.device};
    if (choice->plain || plan->base.device->caps.shared_bytes >= CPA_CUDA_WIDE_BYTES) return 1;
    for (int i = 0; i < CPA_CUDA_PIECE_KINDS; i++) {
        const cpa_cuda_attend_kernel *chosen = choice->of[i].kernel;
        if (!chosen) continue;
        const cpa_cuda_attend_launch launch = {
            .kernel = chosen->over ? chosen->over : chosen, .plan = plan, .spec = &choice->spec};
        if (launch.kernel->launch(&launch, &nowhere) != CPA_OK) return 0;
    }
    return 1;
}

const cpa_cuda_attend_choice *cpa_cuda_plan_choice(const cpa_cuda_plan *plan, const cpa_cuda_attend_call *call) {
    struct cpa_cuda_attend_choices *kept = plan->memory->choices;
    for (int32_t i = 0; i < kept->n; i++)
        if (!memcmp(&kept->of[i].spec.call, call, sizeof *call)) return &kept->of[i];
    cpa_cuda_attend_choice *choice = &kept->of[kept->next];
    cpa_cuda_attend_spec spec = spec_of(plan, call);
    *choice = cpa_cuda_choose_attend(&spec);
    spec.no_memory = !shared_memory_suffices(plan, choice);
    if (spec.no_memory) *choice = cpa_cuda_choose_attend(&spec);
    kept->next = (kept->next + 1) % CPA_CUDA_KEPT_CHOICES;
    if (kept->n < CPA_CUDA_KEPT_CHOICES) kept->n++;
    return choice;
}

int32_t cpa_cuda_plan_tile_rows(const cpa_device *device, const cpa_attention_shape *shape, int32_t block_size) {
    const int hopper = ((const cpa_cuda_device *)device)->path == CPA_CUDA_HOPPER;
    if (cpa_cuda_is_wide(shape)) return CPA_CUDA_WIDE_ROWS;
    return (hopper ? &cpa_cuda_kernel_hopper : &cpa_cuda_kernel_portable)->geometry(shape, block_size).rows;
}
