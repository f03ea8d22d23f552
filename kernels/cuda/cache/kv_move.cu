/* kv_move: tokens from slot to slot. A CTA has some columns of the rows of all tokens: it reads those of all sources
 * into shared memory before it writes a target, and no other CTA touches them. */
#include "kernels/cuda/cache/row_pairs.cuh"

namespace {

constexpr int THREADS = 256, SHARED_BYTES = 32 << 10, MOST_UNIT = 16;
static_assert(CPA_KV_MOVE_MOST * MOST_UNIT <= SHARED_BYTES, "a column of all tokens");

struct move_args {
    tensor tensors[2];
    int32_t heads[2], block_shift;
    int64_t src_slots, dst_slots;
    const int64_t (*slots)[2];
    int32_t n, columns; /* columns of a CTA */
};

template <typename Unit>
__global__ void __launch_bounds__(THREADS) move_units(const __grid_constant__ move_args a) {
    __shared__ __align__(MOST_UNIT) char shared[SHARED_BYTES];
    const tensor t = a.tensors[blockIdx.y];
    Unit *held = (Unit *)shared;
    const int32_t row_units = (int32_t)(t.row_bytes / sizeof(Unit)), all = a.heads[blockIdx.y] * row_units;
    const int32_t first = blockIdx.x * a.columns, columns = min(a.columns, all - first);
    const auto each = [&](auto &&move) {
        for (int32_t i = threadIdx.x; i < a.n * columns; i += THREADS) {
            const int32_t pair = i / columns, column = first + i % columns, head = column / row_units;
            const int64_t from = a.slots[pair][0], to = a.slots[pair][1];
            const int64_t at = (column - head * row_units) * (int64_t)sizeof(Unit);
            if (from >= 0 && from < a.src_slots && to >= 0 && to < a.dst_slots) move(i, from, to, head, at);
        }
    };
    const int64_t in_block = (1 << a.block_shift) - 1;
    each([&](int32_t i, int64_t from, int64_t, int32_t head, int64_t at) {
        held[i] = *(const Unit *)(t.src + (from >> a.block_shift) * t.src_block + (from & in_block) * t.src_token +
                                  head * t.src_head + at);
    });
    __syncthreads();
    each([&](int32_t i, int64_t, int64_t to, int32_t head, int64_t at) {
        *(Unit *)(t.dst + (to >> a.block_shift) * t.dst_block + (to & in_block) * t.dst_token + head * t.dst_head +
                  at) = held[i];
    });
}

/* The runs of a row, which are as far from each other as the last is from the next head's first, are rows of heads. */
tensor runs_of(const cpa_kv_pool &src, const cpa_kv_pool &dst) {
    tensor runs = rows_of(src, dst);
    if (src.runs == 1) return runs;
    runs.src_head = src.run_stride;
    runs.dst_head = dst.run_stride;
    runs.row_bytes = src.run_bytes;
    return runs;
}

template <typename Unit>
cpa_status launch(move_args &a, int parts, cpa_stream *stream) {
    const int64_t keys = a.heads[0] * a.tensors[0].row_bytes, values = a.heads[1] * a.tensors[1].row_bytes;
    const int64_t columns = (keys > values ? keys : values) / (int64_t)sizeof(Unit);
    a.columns = SHARED_BYTES / (int32_t)sizeof(Unit) / a.n;
    if (a.columns > columns) a.columns = (int32_t)columns;
    const dim3 grid((unsigned)((columns + a.columns - 1) / a.columns), parts);
    move_units<Unit><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    return cpa_cuda_launched(stream, "kv_move");
}

cpa_status launch_rows(move_args &a, int parts, cpa_stream *stream) {
    const int64_t alignment = alignment_of(a.tensors);
    if (alignment >= 16) return launch<uint4>(a, parts, stream);
    if (alignment >= 4) return launch<uint32_t>(a, parts, stream);
    return alignment >= 2 ? launch<uint16_t>(a, parts, stream) : launch<uint8_t>(a, parts, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_kv_move(const cpa_kv_move_args *args, cpa_stream *stream) {
    const cpa_kv_view from = cpa_kv_view_resolve(args->src), to = cpa_kv_view_resolve(args->dst);
    move_args a = {{},
                   {},
                   cpa_cuda_log2(from.block_size),
                   from.num_blocks * from.block_size,
                   to.num_blocks * to.block_size,
                   args->slots,
                   (int32_t)args->n,
                   0};
    cpa_kv_pool src[2], dst[2];
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        src[part] = cpa_kv_pool_of(&from, (cpa_kv_part)part);
        dst[part] = cpa_kv_pool_of(&to, (cpa_kv_part)part);
        a.tensors[part] = runs_of(src[part], dst[part]);
        a.heads[part] = from.kv_heads * src[part].runs;
    }
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status == CPA_OK) status = launch_rows(a, cpa_kv_parts(&from), stream);
    if (status != CPA_OK || src[0].scale_bytes == 0) return status;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        a.tensors[part] = scales_of(src[part], dst[part], from.block_size);
        a.heads[part] = from.kv_heads;
    }
    return launch<uint32_t>(a, cpa_kv_parts(&from), stream);
}
