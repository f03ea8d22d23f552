/* The PTX that the portable kernels are made of: asynchronous copies, ldmatrix and mma.sync of compute capability 8.0.
 *
 * mma.m16n8k16 over the 32 lanes, with r = lane / 4 and c = 2 * (lane % 4):
 *     A [16 x 16]   a[0] = (r, c), a[1] = (r + 8, c), a[2] = (r, c + 8), a[3] = (r + 8, c + 8), each with its neighbour
 *     B [16 x 8]    b[0] = (c, r), b[1] = (c + 8, r), each with the element below
 *     C [16 x 8]    c[0], c[1] = (r, c), (r, c + 1); c[2], c[3] = (r + 8, c), (r + 8, c + 1)
 * A tile in shared memory is rows of 16-byte chunks, swizzled so that the 8 rows of a matrix lie in different banks. */
#ifndef CPA_CUDA_MMA_CUH
#define CPA_CUDA_MMA_CUH

#include "kernels/cuda/device/element.cuh"

__device__ inline uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Copies 16 bytes to shared memory. */
__device__ inline void copy_async_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
/* Or zeros where `valid` is false; `from` is not read then. */
__device__ inline void copy_async_16(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
/* Has the 128 bytes around `from` brought to the L2 cache; what is written there later counts all the same. */
__device__ inline void prefetch_l2(const void *from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ inline void copy_async_commit() {
    asm volatile("cp.async.commit_group;");
}
/* Waits until at most N of the groups committed so far are under way. */
template <int N>
__device__ inline void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Byte offset of a chunk in a tile whose rows are DIM 16-bit elements. */
template <int DIM>
__device__ inline uint32_t swizzled(int row, int chunk) {
    static_assert(DIM % 64 == 0, "a row is a multiple of the 128 bytes over which the banks repeat");
    return (uint32_t)(row * DIM * 2 + ((chunk ^ (row & 7)) << 4));
}

__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

/* The address from which a lane loads its part of an operand, for the first pair of chunks (16 columns). at_pair and
 * at_row lead to other places of the tile: since swizzling is an exclusive or with bits of the row that 8 rows on are
 * the same again, one register and constants reach them all. */
template <int DIM>
__device__ inline uint32_t at_pair(uint32_t base, int pair) {
    return (base ^ (uint32_t)((pair & 3) << 5)) + (uint32_t)((pair >> 2) << 7);
}
template <int DIM>
__device__ inline uint32_t at_row(uint32_t base, int row) { /* row: a multiple of 8 */
    return base + (uint32_t)(row * DIM * 2);
}
/* A of 16 rows from `row`. */
template <int DIM>
__device__ inline uint32_t a_base(uint32_t tile, int row, int lane) {
    return tile + swizzled<DIM>(row + (lane & 15), lane >> 4);
}
/* B of S = Q K^T for 16 keys: b[0], b[1] for the first 8, b[2], b[3] for the others. */
template <int DIM>
__device__ inline uint32_t keys_base(uint32_t tile, int lane) {
    return tile + swizzled<DIM>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}
/* B of O = P V for 16 keys and 16 columns: b[0], b[1] for the first 8 columns, b[2], b[3] for the others. */
template <int DIM>
__device__ inline uint32_t values_base(uint32_t tile, int lane) {
    return tile + swizzled<DIM>(lane & 15, lane >> 4);
}

template <typename T>
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Over the four lanes that hold a row of C. */
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

#endif
