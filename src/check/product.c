#include "src/check/product.h"

#include <string.h>

#include "src/check/reference.h"

/* The loops over elements are also compiled for the wider vectors of newer x86 CPUs, as those of the reference. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTOR_LOOPS __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define VECTOR_LOOPS
#endif

enum { LANES = 4, SUMS = 4 };
typedef float narrow_lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef double wide_lanes __attribute__((vector_size(LANES * sizeof(double))));

/* A sum of SUMS * LANES partial sums. */
VECTOR_LOOPS void cpa_reference_multiply(const float *w, int32_t rows, int32_t dim, const float *x, cpa_dtype dtype,
                                         float *out) {
    const int32_t whole = dim / (SUMS * LANES) * (SUMS * LANES);
    for (int32_t i = 0; i < rows; i++, w += dim) {
        wide_lanes sums[SUMS] = {{0}};
        for (int32_t d = 0; d < whole; d += SUMS * LANES) {
            for (int j = 0; j < SUMS; j++) {
                narrow_lanes a, b;
                memcpy(&a, w + d + j * LANES, sizeof a);
                memcpy(&b, x + d + j * LANES, sizeof b);
                sums[j] += __builtin_convertvector(a, wide_lanes) * __builtin_convertvector(b, wide_lanes);
            }
        }
        const wide_lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        double sum = (all[0] + all[1]) + (all[2] + all[3]);
        for (int32_t d = whole; d < dim; d++) sum += (double)w[d] * (double)x[d];
        out[i] = cpa_reference_round((float)sum, dtype);
    }
}
