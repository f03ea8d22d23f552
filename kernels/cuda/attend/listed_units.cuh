/* The units of work of sparse_latent.cu and sparse_entries.cu, a row that lists name keys for and 64 of its heads: which
 * of them a CTA has, which tiles of a row's keys, and how the kernels are launched. C: a kernel's configuration. */
#ifndef CPA_CUDA_LISTED_UNITS_CUH
#define CPA_CUDA_LISTED_UNITS_CUH

#include "base/check.h"
#include "kernels/cuda/attend/cluster.cuh"
#include "kernels/cuda/attend/sparse.cuh"

namespace {

constexpr int MOST_SHARES = 8; /* CTAs of a cluster that any device can place */

/* CTAs that share a row's keys. */
template <typename C>
__device__ int32_t shares() {
    return C::SPLIT ? cluster_ctas() : 1;
}

/* The first unit of a CTA, or of a cluster whose CTAs share the keys of one. */
template <typename C>
__device__ int32_t first_unit() {
    return blockIdx.x / shares<C>();
}

/* What a reader knows of a unit: the tiles of a CTA are those from first_tile on of the list of one scope and, behind
 * it, that of the other. */
struct listed_work {
    listed_row row;
    listed_keys keys[CPA_SPARSE_MOST_SCOPES];
    int32_t first_tile, count, of_first_scope;
    int32_t next; /* unit; -1: it was the last */
};

/* The tiles of the list of a scope. */
template <typename C>
__device__ int32_t take_list(const cpa_cuda_sparse_args &args, listed_work &work, int scope) {
    work.keys[scope] = listed_keys_of(args.lists[scope], work.row, 0);
    return (work.keys[scope].count + C::KEYS - 1) / C::KEYS;
}

/* By one thread. */
template <typename C>
__device__ void take_unit(const cpa_cuda_sparse_args &args, listed_work &work, int32_t unit) {
    const int32_t heads_of_row = (args.a[0].group + GROUP_ROWS - 1) / GROUP_ROWS, ctas = shares<C>();
    const int64_t next = (int64_t)unit + gridDim.x / ctas, cta = C::SPLIT ? cluster_cta() : 0;
    work.next = next < args.rows * heads_of_row ? (int32_t)next : -1;
    fill_listed_row(work.row, args, unit / heads_of_row);
    work.row.piece.row_begin = unit % heads_of_row * GROUP_ROWS;
    work.row.piece.row_end = min(work.row.piece.row_begin + GROUP_ROWS, args.a[0].group);
    work.of_first_scope = take_list<C>(args, work, 0);
    const int64_t all = work.of_first_scope + (args.n_scopes > 1 ? (int64_t)take_list<C>(args, work, 1) : 0);
    work.first_tile = (int32_t)(all * cta / ctas);
    work.count = (int32_t)(all * (cta + 1) / ctas) - work.first_tile;
}

/* CTAs that share a row's keys: as many as fill the device, as long as each has several tiles. A cluster has a unit. */
int shares_of(const cpa_cuda_sparse_args &args, int64_t units, int multiprocessors) {
    constexpr int LEAST_TILES = 2, KEYS = 64;
    int64_t tiles = 0;
    int shares = 1;
    for (int scope = 0; scope < args.n_scopes; scope++)
        tiles += ((int64_t)args.lists[scope].width * args.lists[scope].unit + KEYS - 1) / KEYS;
    while (shares < MOST_SHARES && units * shares * 2 <= multiprocessors && tiles >= LEAST_TILES * 2 * shares)
        shares *= 2;
    return shares;
}

/* Units that CTAs go through; cluster: CTAs that share the keys of a unit, or that have those of a row. */
template <typename C>
cpa_status launch_units(void (*kernel)(cpa_cuda_sparse_args), uint64_t *prepared, const cpa_cuda_sparse_args &args,
                        int64_t units, int cluster, cpa_stream *stream) {
    const int multiprocessors = cpa_cuda_device_of(stream)->multiprocessors / cluster * cluster;
    CPA_TRY(cpa_cuda_shared_memory(stream, (const void *)kernel, C::SHARED_BYTES, prepared));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(C::SPLIT ? units * cluster : units < multiprocessors ? units : multiprocessors));
    config.blockDim = dim3(C::THREADS);
    config.dynamicSmemBytes = C::SHARED_BYTES;
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = cluster > 1;
    return cpa_cuda_check(&stream->error, cudaLaunchKernelEx(&config, kernel, args), "sparse_attend");
}

} // namespace

#endif
