/* The inner loops of linear, built for several instruction sets and picked at run time. A tile has a fixed number of
 * rows; each is a lane of the vectors, and nothing that is done to one depends on the others. So its bits are the same
 * in whatever tile and place, by construction, which a BLAS does not promise: OpenBLAS's kernels of a tile's first and
 * last rows round differently. */
#ifndef CPA_HOST_LINEAR_TILE_H
#define CPA_HOST_LINEAR_TILE_H

#include <cpattn/types.h>

enum {
    CPA_LINEAR_ROWS = 16,     /* of a tile */
    CPA_LINEAR_FEW_ROWS = 8,  /* up to so many go through loops of their own */
    CPA_LINEAR_OUTPUTS = 128, /* at most, of a panel of weights that goes through a tile */
    CPA_SCALE_BLOCK = 128     /* outputs, and inputs, that share a scale of FP8 weights */
};

typedef struct cpa_linear_tile {
    cpa_dtype dtype; /* dtype of x, and of weights that have no scales */
    int64_t inputs;
    int rows;                       /* rows of the tile */
    const char *x[CPA_LINEAR_ROWS]; /* a tile that is not full names a row again */
    const char *weight;             /* weights of the panel's first output */
    int64_t weight_stride;          /* bytes */
    int64_t outputs;
    float *sums; /* [outputs][CPA_LINEAR_ROWS]; only rows of the tile are filled */
    /* Scales of the panel's weights, which are then codes of CPA_FP8_E4M3; NULL: none. That of output o and input i is
     * scales[o * scale_stride + i / scale_inputs]. */
    const float *scales;
    int64_t scale_stride, scale_inputs;
} cpa_linear_tile;

typedef void cpa_linear_multiply(const cpa_linear_tile *tile);

cpa_linear_multiply cpa_linear_portable;
#ifdef __x86_64__
cpa_linear_multiply cpa_linear_avx2;
cpa_linear_multiply cpa_linear_avx512;
#endif

#endif
