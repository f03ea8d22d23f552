/* wgmma of 64 outputs of an expert by as many of its places as a tile has, in steps of 16: weights are A, in shared
 * memory or in registers, rows of x are B. See wgmma.cuh. */
#ifndef CPA_CUDA_EXPERT_WGMMA_CUH
#define CPA_CUDA_EXPERT_WGMMA_CUH

#include <type_traits>

#include "kernels/cuda/attend/wgmma.cuh"

/* clang-format off */
#define CPA_WGMMA_D48 CPA_WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CPA_WGMMA_D56 CPA_WGMMA_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CPA_WGMMA_D72 CPA_WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CPA_WGMMA_D80 CPA_WGMMA_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CPA_WGMMA_D88 CPA_WGMMA_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CPA_WGMMA_A_SHARED(TYPE) \
    CPA_WGMMA_SHARED(TYPE, 80, CPA_WGMMA_D40, "%40", "%41", "%42", CPA_WGMMA_32(0), CPA_WGMMA_8(32)) \
    CPA_WGMMA_SHARED(TYPE, 96, CPA_WGMMA_D48, "%48", "%49", "%50", CPA_WGMMA_32(0), CPA_WGMMA_16(32)) \
    CPA_WGMMA_SHARED(TYPE, 112, CPA_WGMMA_D56, "%56", "%57", "%58", CPA_WGMMA_32(0), CPA_WGMMA_16(32), \
                     CPA_WGMMA_8(48)) \
    CPA_WGMMA_SHARED(TYPE, 128, CPA_WGMMA_D64, "%64", "%65", "%66", CPA_WGMMA_32(0), CPA_WGMMA_32(32)) \
    CPA_WGMMA_SHARED(TYPE, 144, CPA_WGMMA_D72, "%72", "%73", "%74", CPA_WGMMA_32(0), CPA_WGMMA_32(32), \
                     CPA_WGMMA_8(64)) \
    CPA_WGMMA_SHARED(TYPE, 160, CPA_WGMMA_D80, "%80", "%81", "%82", CPA_WGMMA_32(0), CPA_WGMMA_32(32), \
                     CPA_WGMMA_16(64)) \
    CPA_WGMMA_SHARED(TYPE, 176, CPA_WGMMA_D88, "%88", "%89", "%90", CPA_WGMMA_32(0), CPA_WGMMA_32(32), \
                     CPA_WGMMA_16(64), CPA_WGMMA_8(80))
#define CPA_WGMMA_A_REGISTERS(TYPE) \
    CPA_WGMMA_REGISTERS(TYPE, 80, multiply, "0", CPA_WGMMA_D40, "%40, %41, %42, %43", "%44", "%45", \
                        CPA_WGMMA_32(0), CPA_WGMMA_8(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 96, multiply, "0", CPA_WGMMA_D48, "%48, %49, %50, %51", "%52", "%53", \
                        CPA_WGMMA_32(0), CPA_WGMMA_16(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 112, multiply, "0", CPA_WGMMA_D56, "%56, %57, %58, %59", "%60", "%61", \
                        CPA_WGMMA_32(0), CPA_WGMMA_16(32), CPA_WGMMA_8(48)) \
    CPA_WGMMA_REGISTERS(TYPE, 128, multiply, "0", CPA_WGMMA_D64, "%64, %65, %66, %67", "%68", "%69", \
                        CPA_WGMMA_32(0), CPA_WGMMA_32(32)) \
    CPA_WGMMA_REGISTERS(TYPE, 144, multiply, "0", CPA_WGMMA_D72, "%72, %73, %74, %75", "%76", "%77", \
                        CPA_WGMMA_32(0), CPA_WGMMA_32(32), CPA_WGMMA_8(64)) \
    CPA_WGMMA_REGISTERS(TYPE, 160, multiply, "0", CPA_WGMMA_D80, "%80, %81, %82, %83", "%84", "%85", \
                        CPA_WGMMA_32(0), CPA_WGMMA_32(32), CPA_WGMMA_16(64)) \
    CPA_WGMMA_REGISTERS(TYPE, 176, multiply, "0", CPA_WGMMA_D88, "%88, %89, %90, %91", "%92", "%93", \
                        CPA_WGMMA_32(0), CPA_WGMMA_32(32), CPA_WGMMA_16(64), CPA_WGMMA_8(80))
/* clang-format on */

/* multiply(d, a, b, accumulate): with a descriptor of A, or its registers. Without `accumulate`, D = A B. */
template <typename Element>
struct expert_wgmma;
template <>
struct expert_wgmma<__nv_bfloat16> {
    CPA_WGMMA_A_SHARED("bf16")
    CPA_WGMMA_A_REGISTERS("bf16")
};
template <>
struct expert_wgmma<__half> {
    CPA_WGMMA_A_SHARED("f16")
};

/* One width more, and ptxas makes the products of codes wait for one another (warning C7513). */
constexpr int LEAST_COLUMNS = 80, COLUMN_STEP = 16;

/* multiply(std::integral_constant<int, N>()) with the fewest columns N, up to MOST, that hold those. */
template <int MOST, int N = LEAST_COLUMNS, typename Multiply>
__device__ void with_columns(int columns, const Multiply &multiply) {
    if constexpr (N < MOST) {
        if (columns > N) return with_columns<MOST, N + COLUMN_STEP>(columns, multiply);
    }
    multiply(std::integral_constant<int, N>());
}

#endif
