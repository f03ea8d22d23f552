/* index_logits by mma.sync: a warp has 32 keys as A, in registers, for all rows of its CTA, and the heads of a row are
 * B, in shared memory. Codes become fp16, in which their products are exact. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/indexer/index_tile.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP_LANES, KEYS = 128, WARP_KEYS = KEYS / WARPS;
constexpr int M_TILES = WARP_KEYS / 16, HEADS_AT_ONCE = 16;
static_assert(KEYS == THREADS, "a thread has a key's scale");

/* What elements in memory become: Codes, fp16; else they stay. */
template <typename Element>
struct tile_of {
    static constexpr bool CODES = false;
    static constexpr float FACTOR = 1;
};
template <>
struct tile_of<__half> {
    static constexpr bool CODES = true;
    static constexpr float FACTOR = e4m3_codes::FACTOR * e4m3_codes::FACTOR;
};

/* Eight elements of a row as they are multiplied. */
template <typename Element>
__device__ uint4 read_chunk(const char *row, int chunk) {
    if constexpr (tile_of<Element>::CODES)
        return widen_eight<e4m3_codes, Element>(((const uint2 *)row)[chunk], 0, 1);
    else
        return ((const uint4 *)row)[chunk];
}

/* Rows [0, count) of a tile; row_of(i) is where row i lies, NULL for zeros. */
template <typename Element, int DIM, typename RowOf>
__device__ void load_tile(char *tile, int count, const RowOf &row_of) {
    constexpr int CHUNKS = DIM / 8;
    for (int i = threadIdx.x; i < count * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const char *from = row_of(row);
        *(uint4 *)(tile + swizzled<DIM>(row, chunk)) =
            from ? read_chunk<Element>(from, chunk) : make_uint4(0, 0, 0, 0);
    }
}

template <int DIM>
struct tile_memory {
    alignas(16) char keys[KEYS * DIM * 2];
    alignas(16) char q[CPA_INDEX_MOST_HEADS * DIM * 2];
    float weights[CPA_INDEX_MOST_HEADS], scores[KEYS];
};

/* The scores of a warp's keys for the row whose heads and weights are in shared memory. */
template <typename Element, int DIM>
__device__ void score_keys(tile_memory<DIM> &memory, const uint32_t (&a)[M_TILES][DIM / 16][4], int32_t heads) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const uint32_t base = keys_base<DIM>(shared_address(memory.q), lane);
    float sums[M_TILES][2] = {};
    for (int32_t head = 0; head < heads; head += HEADS_AT_ONCE) {
        float c[M_TILES][2][4] = {};
#pragma unroll
        for (int pair = 0; pair < DIM / 16; pair++) {
            uint32_t b[4];
            load_matrices(b, at_pair<DIM>(at_row<DIM>(base, head), pair));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma<Element>(c[m][0], a[m][pair], b[0], b[1]);
                mma<Element>(c[m][1], a[m][pair], b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 w = *(const float2 *)(memory.weights + head + 8 * n + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    sums[m][i] = fmaf(fmaxf(c[m][n][2 * i], 0), w.x, sums[m][i]);
                    sums[m][i] = fmaf(fmaxf(c[m][n][2 * i + 1], 0), w.y, sums[m][i]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float sum = quad_sum(sums[m][i]);
            if (lane % 4 == 0) memory.scores[warp * WARP_KEYS + m * 16 + i * 8 + lane / 4] = sum;
        }
    }
}

template <typename Element, int DIM>
__global__ void __launch_bounds__(THREADS) index_logits_tiles(const __grid_constant__ cpa_cuda_index_work w) {
    extern __shared__ char shared[];
    tile_memory<DIM> &memory = *(tile_memory<DIM> *)shared;
    const index_tile tile = find_index_tile(w, blockIdx.x);
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const int32_t first = blockIdx.y * KEYS, key = first + (int32_t)threadIdx.x;
    const int32_t head_bytes = DIM * (tile_of<Element>::CODES ? 1 : 2);
    const int32_t padded = (w.heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE * HEADS_AT_ONCE;
    const float scale =
        key < tile.keys ? read_index_scale(w, index_block(w, tile.item, key), key) * tile_of<Element>::FACTOR : 0;
    uint32_t a[M_TILES][DIM / 16][4] = {};
    if (first < tile.keys) {
        load_tile<Element, DIM>(memory.keys, KEYS, [&](int i) {
            return first + i < tile.keys ? index_row(w, index_block(w, tile.item, first + i), first + i) : NULL;
        });
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const uint32_t base = a_base<DIM>(shared_address(memory.keys), warp * WARP_KEYS + m * 16, lane);
#pragma unroll
            for (int pair = 0; pair < DIM / 16; pair++) load_matrices(a[m][pair], at_pair<DIM>(base, pair));
        }
    }
    for (int32_t r = 0; r < tile.rows; r++) {
        const int64_t row = tile.item->q_row + tile.first + r;
        if (first < tile.keys) {
            const char *q = w.q + row * w.q_row_stride;
            load_tile<Element, DIM>(memory.q, padded, [&](int i) { return i < w.heads ? q + i * head_bytes : NULL; });
            for (int32_t i = threadIdx.x; i < padded; i += THREADS)
                memory.weights[i] =
                    i >= w.heads ? 0 : w.weights ? w.weights[row * w.weight_row_stride + i] : 1;
            __syncthreads();
            score_keys<Element, DIM>(memory, a, w.heads);
            __syncwarp();
            memory.scores[threadIdx.x] *= scale; /* of its own warp's keys */
        }
        __syncthreads();
        store_columns(w, row, first, (int32_t)cpa_index_keys_seen(&w.items, tile.item, tile.first + r), memory.scores,
                      KEYS);
        __syncthreads();
    }
}

template <typename Element, int DIM>
cpa_status launch(const cpa_cuda_index_work &w, cpa_stream *stream) {
    static uint64_t prepared;
    const int64_t chunks = index_chunks(w, KEYS), most = 65535;
    const int bytes = (int)sizeof(tile_memory<DIM>);
    if (chunks > most) return cpa_cuda_unsupported(stream, "index_logits: more columns than a grid takes", w.width);
    cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)index_logits_tiles<Element, DIM>, bytes, &prepared);
    if (status != CPA_OK) return status;
    index_logits_tiles<Element, DIM>
        <<<dim3((unsigned)w.tiles, (unsigned)chunks), THREADS, bytes, cpa_cuda_handle(stream)>>>(w);
    return cpa_cuda_launched(stream, "index_logits");
}

} // namespace

extern "C" cpa_status cpa_cuda_index_logits_tiles(const cpa_cuda_index_work *w, cpa_stream *stream) {
    if (w->dtype == CPA_BF16)
        return w->dim == 64 ? launch<__nv_bfloat16, 64>(*w, stream) : launch<__nv_bfloat16, 128>(*w, stream);
    return w->dim == 64 ? launch<__half, 64>(*w, stream) : launch<__half, 128>(*w, stream);
}
