/* The centroids of CPA_TQ_4BIT, CPA_TQ_K3V4 and CPA_TQ_3BIT (cpattn/shape.h): what 2^b levels of a normal variable of
 * variance 1 become under Lloyd's algorithm (Max, IRE Trans. Inf. Theory 6, 1960), begun with even levels over +-3.5
 * sigma, cells closed at +-10.5 sigma, integrals by trapezoids of 200 steps, for 200 rounds or until nothing moves by
 * 1e-10. They are symmetric: the positive half is listed, and test_turboquant.c computes it again. A row that is rotated
 * has elements of about this distribution once it is scaled to the length sqrt(n). */
#ifndef CPA_CODEBOOK_H
#define CPA_CODEBOOK_H

#include <stdint.h>

#define CPA_CODEBOOK_3BIT 0.244983592f, 0.755645499f, 1.343180002f, 2.150349539f
#define CPA_CODEBOOK_4BIT                                                                                              \
    0.128427661f, 0.388137791f, 0.656879919f, 0.942448243f, 1.256257570f, 1.617881760f, 2.068447119f, 2.730922219f

/* Levels of the finest codebook; what divides the width of a row, and the widest one. */
enum { CPA_MOST_LEVELS = 16, CPA_TQ_MULTIPLE = 32, CPA_TQ_MOST_DIM = 256 };

#endif
