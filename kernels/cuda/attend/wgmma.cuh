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
/* The accumulators as operands of the instruction, by their numbers, and as arguments of the statement, by eights. */
#define CPA_WGMMA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CPA_WGMMA_D16 CPA_WGMMA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CPA_WGMMA_D32 CPA_WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CPA_WGMMA_D36 CPA_WGMMA_D32 ", %32, %33, %34, %35"
#define CPA_WGMMA_D40 CPA_WGMMA_D36 ", %36, %37, %38, %39"
#define CPA_WGMMA_D64 \
    CPA_WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
                  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CPA_WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CPA_WGMMA_8(i) CPA_WGMMA_4(i), CPA_WGMMA_4(i + 4)
#define CPA_WGMMA_16(i) CPA_WGMMA_8(i), CPA_WGMMA_8(i + 8)
#define CPA_WGMMA_32(i) CPA_WGMMA_16(i), CPA_WGMMA_16(i + 16)

/* A product of N columns. D lists the accumulators, which are the last arguments too; A_AT, B_AT and P_AT are the numbers
 * of the operands behind: a, or its four registers, b, and `accumulate`. */
#define CPA_WGMMA_SHARED(TYPE, N, D, A_AT, B_AT, P_AT, ...) \
    __device__ static inline void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, " P_AT ", 0; " \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" D "}, " A_AT ", " B_AT ", p, 1, 1, 0, 0; }" \
        : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate)); \
    }
#define CPA_WGMMA_REGISTERS(TYPE, N, NAME, TRANSPOSED, D, A_AT, B_AT, P_AT, ...) \
    __device__ static inline void NAME(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, " P_AT ", 0; " \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " \
        "{" D "}, {" A_AT "}, " B_AT ", p, 1, 1, " TRANSPOSED "; }" \
        : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }

/* P V by the width of O, and Q K^T by the keys of a tile. */
#define CPA_WGMMA_VALUES(TYPE) \
    CPA_WGMMA_REGISTERS(TYPE, 16, multiply, "1", CPA_WGMMA_D8, "%8, %9, %10, %11", "%12", "%13", CPA_WGMMA_8(0)) \
    CPA_WGMMA_REGISTERS(TYPE, 32, multiply, "1", CPA_WGMMA_D16, "%16, %17, %18, %19", "%20", "%21", CPA_WGMMA_16(0)) \
    CPA_WGMMA_REGISTERS(TYPE, 64, multiply, "1", CPA_WGMMA_D32, "%32, %33, %34, %35", "%36", "%37", CPA_WGMMA_32(0)) \
    CPA_WGMMA_REGISTERS(TYPE, 72, multiply, "1", CPA_WGMMA_D36, "%36, %37, %38, %39", "%40", "%41", CPA_WGMMA_32(0), \
                        CPA_WGMMA_4(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 128, multiply, "1", CPA_WGMMA_D64, "%64, %65, %66, %67", "%68", "%69", CPA_WGMMA_32(0), \
                        CPA_WGMMA_32(32))
#define CPA_WGMMA_SCORES(TYPE) \
    CPA_WGMMA_SHARED(TYPE, 64, CPA_WGMMA_D32, "%32", "%33", "%34", CPA_WGMMA_32(0)) \
    CPA_WGMMA_SHARED(TYPE, 80, CPA_WGMMA_D40, "%40", "%41", "%42", CPA_WGMMA_32(0), CPA_WGMMA_8(32)) \
    CPA_WGMMA_SHARED(TYPE, 128, CPA_WGMMA_D64, "%64", "%65", "%66", CPA_WGMMA_32(0), CPA_WGMMA_32(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 64, multiply_rows, "0", CPA_WGMMA_D32, "%32, %33, %34, %35", "%36", "%37", \
                        CPA_WGMMA_32(0)) \
    CPA_WGMMA_REGISTERS(TYPE, 80, multiply_rows, "0", CPA_WGMMA_D40, "%40, %41, %42, %43", "%44", "%45", \
                        CPA_WGMMA_32(0), CPA_WGMMA_8(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 128, multiply_rows, "0", CPA_WGMMA_D64, "%64, %65, %66, %67", "%68", "%69", \
                        CPA_WGMMA_32(0), CPA_WGMMA_32(32))
/* clang-format on */

/* multiply(d, a, b, accumulate): with A in shared memory (Q K^T: both operands have the head's width as rows), or in
 * registers (P V: the rows of B are the columns of the result). multiply_rows: Q K^T with A in registers. Without
 * `accumulate`, D = A B. */
template <typename Element>
struct wgmma;
template <>
struct wgmma<__nv_bfloat16> {
    CPA_WGMMA_VALUES("bf16")
    CPA_WGMMA_SCORES("bf16")
};
template <>
struct wgmma<__half> {
    CPA_WGMMA_VALUES("f16")
    CPA_WGMMA_SCORES("f16")
};

#endif
