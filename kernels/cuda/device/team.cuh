/* The CTAs that share an item of work: on compute capability 9.0 those of a cluster, whose shared memory each of them
 * reads; elsewhere, and where it was launched without clusters, one. */
#ifndef CPA_CUDA_TEAM_CUH
#define CPA_CUDA_TEAM_CUH

#include <cooperative_groups.h>

/* One CTA, with what a team has. */
struct lone_cta {
    __device__ int rank() const { return 0; }
    __device__ int size() const { return 1; }
    __device__ void sync() const { __syncthreads(); }
    template <typename T>
    __device__ T read(const T &own, int) const {
        return own;
    }
};

#if __CUDA_ARCH__ >= 900
struct team {
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    __device__ int rank() const { return (int)cluster.block_rank(); }
    __device__ int size() const { return (int)cluster.num_blocks(); }
    __device__ void sync() const { cluster.sync(); }
    /* What a variable in shared memory is in another CTA. */
    template <typename T>
    __device__ T read(const T &own, int of) const {
        return *cluster.map_shared_rank(&own, of);
    }
};
#else
using team = lone_cta;
#endif

#endif
