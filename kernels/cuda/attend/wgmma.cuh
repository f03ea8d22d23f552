/* wgmma.mma_async of compute capability 9.0: D [64 x N] += A [64 x 16] B [16 x N] by the 128 threads of a warpgroup, in
 * bf16 or fp16 with fp32 accumulation. Thread t holds of D, with r = 16 * (t / 32) + t % 32 / 4 and c = 2 * (t % 4):
 *     d[4 n], d[4 n + 1] = (r, 8 n + c), (r, 8 n + c + 1); d[4 n + 2], d[4 n + 3] = the same of row r + 8
 * and of A in registers what mma.m16n8k16 holds (see mma.cuh) for rows 16 * (t / 32) and on. Operands in shared memory
 * are named by descriptors of tiles whose rows of 128 bytes, or of 64 or 32, are swizzled as the bulk tensor copies
 * write them. */
#ifndef CPA_CUDA_WGMMA_CUH
#define CPA_CUDA_WGMMA_CUH

#include "kernels/cuda/device/element.cuh"

/* The descriptor of a tile at a shared address: rows of ROW bytes, eight rows after eight; `leading` is the distance to
 * the next columns of as many bytes, where the operand's rows are its inner dimension. */
template <int ROW = 128>
__device__ inline uint64_t wgmma_descriptor(uint32_t address, uint32_t leading) {
    static_assert(ROW == 128 || ROW == 64 || ROW == 32, "swizzled rows");
    const uint64_t swizzle = (uint64_t)(ROW == 128 ? 1 : ROW == 64 ? 2 : 3) << 62, eight_rows = 8 * ROW;
    return swizzle | (eight_rows >> 4) << 32 | (uint64_t)(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
/* The same descriptor `bytes` further. */
__device__ inline uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

/* Before the first wgmma after other instructions touched its registers. */
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N committed groups are under way. */
template <int N>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving accesses to registers of a wgmma across this point. */
template <int N>
__device__ inline void wgmma_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* clang-format off */
#define CPA_WGMMA_N64_SHARED(TYPE) \
    __device__ static inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; " \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "%32, %33, p, 1, 1, 0, 0; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
        : "l"(a), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N16_REGISTERS(TYPE, NAME, TRANSPOSED) \
    __device__ static inline void NAME(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %13, 0; " \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7}, " \
        "{%8, %9, %10, %11}, %12, p, 1, 1, " TRANSPOSED "; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N32_REGISTERS(TYPE, NAME, TRANSPOSED) \
    __device__ static inline void NAME(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; " \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
        "{%16, %17, %18, %19}, %20, p, 1, 1, " TRANSPOSED "; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N64_REGISTERS(TYPE, NAME, TRANSPOSED) \
    __device__ static inline void NAME(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; " \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "{%32, %33, %34, %35}, %36, p, 1, 1, " TRANSPOSED "; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N72_REGISTERS(TYPE, NAME, TRANSPOSED) \
    __device__ static inline void NAME(float (&d)[36], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %41, 0; " \
        "wgmma.mma_async.sync.aligned.m64n72k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35}, " \
        "{%36, %37, %38, %39}, %40, p, 1, 1, " TRANSPOSED "; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N128_SHARED(TYPE) \
    __device__ static inline void multiply(float (&d)[64], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; " \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "%64, %65, p, 1, 1, 0, 0; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
        : "l"(a), "l"(b), "r"(accumulate)); \
    }

#define CPA_WGMMA_N128_REGISTERS(TYPE, NAME, TRANSPOSED) \
    __device__ static inline void NAME(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; " \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "{%64, %65, %66, %67}, %68, p, 1, 1, " TRANSPOSED "; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }
/* clang-format on */

/* multiply(d, a, b, accumulate): with A in shared memory (Q K^T: both operands have the head's width as rows), or in
 * registers (P V: the rows of B are the columns of the result). multiply_rows: Q K^T with A in registers. Without
 * `accumulate`, D = A B. */
template <typename Element>
struct wgmma;
template <>
struct wgmma<__nv_bfloat16> {
    CPA_WGMMA_N16_REGISTERS("bf16", multiply, "1")
    CPA_WGMMA_N32_REGISTERS("bf16", multiply, "1")
    CPA_WGMMA_N64_SHARED("bf16")
    CPA_WGMMA_N64_REGISTERS("bf16", multiply, "1")
    CPA_WGMMA_N64_REGISTERS("bf16", multiply_rows, "0")
    CPA_WGMMA_N72_REGISTERS("bf16", multiply, "1")
    CPA_WGMMA_N128_SHARED("bf16")
    CPA_WGMMA_N128_REGISTERS("bf16", multiply, "1")
    CPA_WGMMA_N128_REGISTERS("bf16", multiply_rows, "0")
};
template <>
struct wgmma<__half> {
    CPA_WGMMA_N16_REGISTERS("f16", multiply, "1")
    CPA_WGMMA_N32_REGISTERS("f16", multiply, "1")
    CPA_WGMMA_N64_SHARED("f16")
    CPA_WGMMA_N64_REGISTERS("f16", multiply, "1")
    CPA_WGMMA_N64_REGISTERS("f16", multiply_rows, "0")
    CPA_WGMMA_N72_REGISTERS("f16", multiply, "1")
    CPA_WGMMA_N128_SHARED("f16")
    CPA_WGMMA_N128_REGISTERS("f16", multiply, "1")
    CPA_WGMMA_N128_REGISTERS("f16", multiply_rows, "0")
};

#endif
