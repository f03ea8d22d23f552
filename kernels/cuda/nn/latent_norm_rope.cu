/* latent_norm_rope: a CTA makes the row of latents of a token, in shared memory, and stores it; another one rotates the
 * token's queries. The norm is that of rmsnorm, by the threads that rmsnorm has for the width. The kernel here takes
 * any row; that of latent_warp.cuh, which is faster, those that a warp can have. */
#include "kernels/cuda/nn/latent_pool.cuh"
#include "kernels/cuda/nn/latent_warp.cuh"

namespace {

constexpr int LEAST_THREADS = 128, MOST_THREADS = 512;
static_assert(CPA_MAX_HEAD_DIM <= MOST_THREADS * NORM_KEPT, "threads for each element of a row");

/* The scale word of a tile, found by a warp. */
template <typename T>
__device__ uint32_t tile_word(const latent_pool &pool, const T *tile) {
    float low = 0, high = 0;
    for (int32_t i = threadIdx.x % WARP_LANES; i < pool.tile; i += WARP_LANES) {
        const float finite = finite_or_zero(coded_element(pool, to_float(tile[i])));
        low = fminf(low, finite);
        high = fmaxf(high, finite);
    }
    low = -warp_max(-low), high = warp_max(high);
    return tile_word(pool, low, high);
}

/* Codes of a row: a warp takes a tile after the other. */
template <typename T>
__device__ void store_tiles(const latent_pool &pool, const T *latent, const latent_place &to) {
    const cpa_dtype codes = codes_of(pool);
    char *row = to.row;
    for (int32_t t = threadIdx.x / WARP_LANES; t < pool.tiles; t += blockDim.x / WARP_LANES) {
        const T *tile = latent + t * pool.tile;
        const uint32_t word = tile_word(pool, tile);
        for (int32_t i = threadIdx.x % WARP_LANES; i < pool.tile; i += WARP_LANES)
            row[t * pool.tile + i] = (char)code_of(codes, word, coded_element(pool, to_float(tile[i])));
        if (threadIdx.x % WARP_LANES != 0) continue;
        if (pool.scales_at) ((uint32_t *)(row + pool.scales_at))[t] = word;
        if (pool.bytes_at) to.store_byte(pool, t, word);
        if (pool.words_at) *to.word(pool) = word;
    }
    for (int32_t i = threadIdx.x; i < pool.tail; i += blockDim.x)
        ((__nv_bfloat16 *)(row + pool.tail_at))[i] = converted<__nv_bfloat16>(latent[pool.tiles * pool.tile + i]);
}

template <typename T>
__device__ void store_plain(cpa_dtype dtype, const T *latent, int32_t dim, char *row) {
    for (int32_t i = threadIdx.x; i < dim; i += blockDim.x) {
        if (dtype == CPA_F32) {
            ((float *)row)[i] = converted<float>(latent[i]);
        } else if (dtype == CPA_BF16) {
            ((__nv_bfloat16 *)row)[i] = converted<__nv_bfloat16>(latent[i]);
        } else {
            ((__half *)row)[i] = converted<__half>(latent[i]);
        }
    }
}

template <typename T>
__device__ void store_latent(const latent_args &a, int64_t row, const T *latent) {
    const latent_pool &pool = a.pool;
    const int64_t slot = checked_slot(pool, row, given_slot(pool, row), threadIdx.x == 0);
    for (int32_t i = threadIdx.x; i < a.k_dim; i += blockDim.x) {
        if (a.out) ((T *)a.out)[row * a.out_stride + i] = latent[i];
        if (slot >= 0 && pool.nonfinite && is_nonfinite(to_float(latent[i]))) pool.nonfinite[row] = 1;
    }
    if (slot < 0) return;
    const latent_place to(pool, slot);
    if (pool.tiles) {
        store_tiles(pool, latent, to);
    } else {
        store_plain(pool.dtype, latent, a.k_dim, to.row);
    }
}

/* blockIdx.y: 0 the latent of the row, 1 its queries. */
template <typename T, int UNIT>
__global__ void __launch_bounds__(MOST_THREADS, 1) latent_norm_rope(const __grid_constant__ latent_args a) {
    __shared__ __align__(16) T latent[CPA_MAX_HEAD_DIM];
    const int64_t row = blockIdx.x;
    const row_threads threads = {(int32_t)threadIdx.x, (int32_t)blockDim.x};
    if (blockIdx.y == 1) {
        dependent_allow();
        dependent_wait();
        rotate_row<T, UNIT, false>(a.queries, row, threads);
        return;
    }
    normed_row<T, T, UNIT> norm(a.norm);
    dependent_allow();
    dependent_wait();
    norm.sum(a.norm, row);
    norm.for_units([&](int32_t u, const auto &normed) {
        if (u < norm.units) *(unit_of<T, UNIT> *)(latent + u * UNIT) = narrow<T, UNIT>(normed.element);
    });
    rotate_heads<T, UNIT, false, 1>(a.key, row, (const T *)a.key.x + row * a.key.x_stride, latent + a.norm.width,
                                    threads);
    __syncthreads();
    store_latent(a, row, latent);
}

latent_pool pool_of(const cpa_latent_norm_rope_args *args, cpa_stream *stream) {
    if (!args->slot_mapping) return {};
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    const cpa_kv_pool keys = cpa_kv_pool_of(&kv, CPA_KEYS);
    const cpa_row_traits *row = &cpa_dtype_traits_of(kv.dtype)->rows[CPA_KEYS];
    latent_pool pool = {};
    pool.slot_mapping = args->slot_mapping;
    pool.memory = keys.memory;
    pool.dtype = kv.dtype;
    pool.slots = kv.num_blocks * kv.block_size;
    pool.block_stride = keys.block_stride, pool.token_stride = keys.token_stride;
    pool.block_shift = cpa_cuda_log2(kv.block_size);
    pool.scale = keys.tensor_scale;
    pool.head_scales = keys.head_scales;
    (row->tile ? pool.bytes_at : pool.words_at) = cpa_kv_words_at(&kv, CPA_KEYS);
    pool.bad_slot = ((cpa_cuda_stream *)stream)->bad_slot;
    pool.nonfinite = args->nonfinite;
    if (!cpa_dtype_is_quantised(kv.dtype)) return pool;
    const int32_t coded = kv.k_dim - row->tail;
    pool.tail = row->tail;
    pool.tile = row->tile ? row->tile : coded;
    pool.tiles = coded / pool.tile;
    pool.scales_at = row->tile && row->scale_in_row ? coded : 0;
    pool.tail_at = coded + (row->scale_in_row ? pool.tiles * (int64_t)sizeof(float) : 0);
    return pool;
}

/* The part of a row that is rotated, as a head of rotate, whose out is in shared memory. */
cpa_rotate_args key_of(const cpa_latent_norm_rope_args *args) {
    cpa_rotate_args key = cpa_latent_queries(args);
    key.heads = 1;
    key.x = (const char *)args->x + args->shape.v_dim * cpa_dtype_bytes(args->shape.dtype);
    key.x_stride = args->x_stride;
    key.x_head_stride = key.out_head_stride = key.dim;
    key.out_stride = 0;
    key.out = NULL;
    return key;
}

} // namespace

extern "C" cpa_status cpa_cuda_latent_norm_rope(const cpa_latent_norm_rope_args *args, cpa_stream *stream) {
    const cpa_attention_shape &s = args->shape;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "latent_norm_rope: more rows than a grid has CTAs", args->rows);
    latent_args a = {};
    a.norm = {s.v_dim, args->x, args->x_stride, NULL, 0, args->weight, args->weight_offset, args->eps, NULL, 0};
    a.key = key_of(args);
    a.queries = cpa_latent_queries(args);
    a.k_dim = s.k_dim;
    a.out = args->out, a.out_stride = args->out_stride;
    a.pool = pool_of(args, stream);
    const bool vectors = norm_in_vectors(a.norm, s.dtype) && rotate_in_vectors(a.key) &&
                         (!args->q || rotate_in_vectors(a.queries));
    const bool by_warps = vectors && is_latent_of_warp(a, s.dtype);
    return launch_for_elements(s.dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        if (by_warps)
            return launch_early(latent_norm_rope_warps<T>,
                                dim3((unsigned)((args->rows + ROWS_OF_CTA - 1) / ROWS_OF_CTA),
                                     1 + (args->q ? ROWS_OF_CTA : 0)),
                                ROW_WARPS_THREADS, a, stream, "latent_norm_rope");
        const int threads = norm_cta_threads(s.v_dim, vectors ? VECTOR<T> : 1);
        return launch_early(vectors ? latent_norm_rope<T, VECTOR<T>> : latent_norm_rope<T, 1>,
                            dim3((unsigned)args->rows, args->q ? 2 : 1),
                            threads > LEAST_THREADS ? threads : LEAST_THREADS, a, stream, "latent_norm_rope");
    });
}
