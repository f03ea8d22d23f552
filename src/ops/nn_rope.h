/* Checks of rotations, for the operators that rotate. */
#ifndef CPA_OPS_NN_ROPE_H
#define CPA_OPS_NN_ROPE_H

#include <cpattn/nn.h>

/* Rotations of heads of `width` elements, which the caller calls by that name; and the positions of rows. */
cpa_status cpa_nn_check_rope(const char *where, const cpa_rope *rope, const char *name, int32_t width, cpa_error *err);
cpa_status cpa_nn_check_positions(const char *where, const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                  cpa_error *err);

#endif
