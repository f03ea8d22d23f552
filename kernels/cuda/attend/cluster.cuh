/* The shared memory of the CTAs of a cluster (compute capability 9.0), through which they join what each has. Before 9.0 a
 * CTA is alone, and reads its own. */
#ifndef CPA_CUDA_CLUSTER_CUH
#define CPA_CUDA_CLUSTER_CUH

#include <stdint.h>

/* CTAs of the cluster, and the number of this one among them. */
__device__ inline int32_t cluster_ctas() {
    int32_t ctas = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
#endif
    return ctas;
}
__device__ inline int32_t cluster_cta() {
    int32_t cta = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta));
#endif
    return cta;
}

/* A barrier among all threads of the cluster, behind which they see what the others wrote. */
__device__ inline void join_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/* What lies at a shared address of a CTA. */
__device__ inline uint32_t address_in(uint32_t address, int32_t cta) {
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(cta));
#endif
    return address;
}
__device__ inline float read_in(uint32_t address, int32_t cta) {
    float x;
    address = address_in(address, cta);
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#endif
    return x;
}
__device__ inline float4 read_four_in(uint32_t address, int32_t cta) {
    float4 x;
    address = address_in(address, cta);
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
#endif
    return x;
}

#endif
