/* kv_copy and kv_pack: whole or partial blocks from pool to pool. The list of blocks travels in the parameters of the
 * kernel, so that the caller's arrays may go as soon as the call returns. A CTA copies the keys or the values of a
 * block; with streaming hints it would be 3% slower on an H200. Either pool may be pinned host memory. The launches of
 * a call copy different blocks: on compute capability 9.0 each may be placed while the one before it ends, and ends
 * behind it. Rows that lie in runs on both sides are copied as whole blocks; tokens of such blocks, and blocks that lie
 * so on one side, are left to kv_convert.cu. */
#include <string.h>

#include "base/dependent.cuh"
#include "kernels/cuda/cache/kv_convert.h"
#include "kernels/cuda/cache/row_pairs.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4;            /* loads of a thread that are under way together */
constexpr int BLOCKS_A_LAUNCH = 1024; /* 16 KB of the 32 KB that parameters may take */

using block_copy = cpa_cuda_block_move;

struct copy_args {
    tensor tensors[2];
    int32_t heads;
    block_copy blocks[BLOCKS_A_LAUNCH];
};

template <typename Unit>
__global__ void __launch_bounds__(THREADS) copy_blocks(const __grid_constant__ copy_args a) {
    dependent_allow();
    const tensor t = a.tensors[blockIdx.y];
    const block_copy copy = a.blocks[blockIdx.x];
    const char *src = t.src + copy.src * t.src_block;
    char *dst = t.dst + copy.dst * t.dst_block;
    const int32_t row_units = (int32_t)(t.row_bytes / sizeof(Unit)), token_units = a.heads * row_units;
    const int32_t units = copy.tokens * token_units;
    for (int32_t first = threadIdx.x; first < units; first += AT_ONCE * THREADS) {
        Unit value[AT_ONCE];
        int64_t to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t unit = first + i * THREADS, token = unit / token_units;
            const int32_t in_token = unit - token * token_units, head = in_token / row_units;
            const int64_t column = (in_token - head * row_units) * (int64_t)sizeof(Unit);
            to[i] = token * t.dst_token + head * t.dst_head + column;
            if (unit < units) value[i] = __ldg((const Unit *)(src + token * t.src_token + head * t.src_head + column));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * THREADS < units) *(Unit *)(dst + to[i]) = value[i];
    }
    dependent_wait();
}

/* All rows of a block as one, and all of its scales. */
tensor blocks_of(const cpa_kv_pool &src, const cpa_kv_pool &dst, int64_t rows) {
    return {src.memory, dst.memory, src.block_stride, 0, 0, dst.block_stride, 0, 0, rows * src.row_bytes};
}
tensor block_scales_of(const cpa_kv_pool &src, const cpa_kv_pool &dst, int64_t rows) {
    return {src.memory + src.scales_at, dst.memory + dst.scales_at, src.block_stride, 0, 0, dst.block_stride, 0, 0,
            rows * src.scale_bytes};
}

/* Collects blocks and launches them, a parameter list at a time. */
struct copier {
    copy_args args;
    tensor rows[2], scales[2];
    int32_t count;
    int64_t alignment;
    cpa_stream *stream;
    const char *operation;
    bool first; /* the next launch is the first of the call, which waits for what came before */
    cpa_kv_view from, to;
    bool whole; /* each block is copied as one row */
    bool moved; /* the layouts differ: cpa_cuda_kv_move_tokens copies */

    copier(const cpa_kv_view &src, const cpa_kv_view &dst, cpa_stream *on, const char *name)
        : count(0), stream(on), operation(name), first(true), from(cpa_kv_view_resolve(src)),
          to(cpa_kv_view_resolve(dst)), whole(from.layout == CPA_VLLM_X && to.layout == CPA_VLLM_X),
          moved(!whole && (from.layout == CPA_VLLM_X || to.layout == CPA_VLLM_X)) {
        const int64_t block_rows = (int64_t)from.kv_heads * from.block_size;
        for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
            const cpa_kv_pool src_pool = cpa_kv_pool_of(&from, (cpa_kv_part)part);
            const cpa_kv_pool dst_pool = cpa_kv_pool_of(&to, (cpa_kv_part)part);
            rows[part] = args.tensors[part] =
                whole ? blocks_of(src_pool, dst_pool, block_rows) : rows_of(src_pool, dst_pool);
            scales[part] = whole ? block_scales_of(src_pool, dst_pool, block_rows)
                                 : scales_of(src_pool, dst_pool, from.block_size);
        }
        args.heads = whole ? 1 : from.kv_heads;
        alignment = alignment_of(args.tensors);
    }
    template <typename Unit>
    cpa_status launch() {
        const bool early = !first && cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
        first = false;
        return cpa_cuda_check(
            &stream->error,
            launch_dependent(copy_blocks<Unit>, dim3(count, cpa_kv_parts(&from)), THREADS, args, early, cpa_cuda_handle(stream)),
            operation);
    }
    cpa_status launch_rows() {
        if (alignment >= 16) return launch<uint4>();
        if (alignment >= 4) return launch<uint32_t>();
        return alignment >= 2 ? launch<uint16_t>() : launch<uint8_t>();
    }
    cpa_status flush() {
        if (count == 0) return CPA_OK;
        cpa_status status =
            moved ? cpa_cuda_kv_move_tokens(&from, &to, args.blocks, count, 1, operation, stream) : launch_rows();
        if (status == CPA_OK && !moved && scales[0].row_bytes) {
            memcpy(args.tensors, scales, sizeof scales);
            status = launch<uint32_t>();
            memcpy(args.tensors, rows, sizeof rows);
        }
        count = 0;
        return status;
    }
    cpa_status add(int64_t src, int64_t dst, int64_t tokens) {
        if (whole && tokens < from.block_size) {
            const block_copy copy = {(int32_t)src, (int32_t)dst, (int32_t)tokens, 0};
            return cpa_cuda_kv_move_tokens(&from, &to, &copy, 1, 1, operation, stream);
        }
        if (whole) tokens = 1;
        args.blocks[count++] = {(int32_t)src, (int32_t)dst, (int32_t)tokens, 0};
        return count == BLOCKS_A_LAUNCH ? flush() : CPA_OK;
    }
};

} // namespace

extern "C" cpa_status cpa_cuda_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    copier blocks(args->src, args->dst, stream, "kv_copy");
    for (int64_t i = 0; i < args->n_pairs && status == CPA_OK; i++)
        status = blocks.add(args->pairs[i][0], args->pairs[i][1], args->src.block_size);
    return status == CPA_OK ? blocks.flush() : status;
}

extern "C" cpa_status cpa_cuda_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    const int64_t block_size = args->src.block_size;
    copier blocks(args->src, args->dst, stream, "kv_pack");
    for (int64_t s = 0; s < args->n_ranges; s++) {
        const cpa_kv_range range = args->ranges[s];
        const int32_t *table = args->block_tables + range.table + range.first / block_size;
        for (int64_t done = 0; done < range.count && status == CPA_OK; done += block_size) {
            const int64_t left = range.count - done;
            status = blocks.add(table[done / block_size], range.dst_block + done / block_size,
                                left < block_size ? left : block_size);
        }
    }
    return status == CPA_OK ? blocks.flush() : status;
}
