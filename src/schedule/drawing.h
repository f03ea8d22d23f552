/* How a token is drawn, each field told once: those of cpa_sampling that reach the draw of every token. The check of a
 * request, the plan of a step and its wire form, and the arrays of a step are made from this list. */
#ifndef CPA_DRAWING_H
#define CPA_DRAWING_H

#include <stdint.h>

/* Of numbers that have no bound of their own. */
#define CPA_DRAWING_MOST 1e30f

/* X(TYPE, FIELD, LEAST, MOST, NONE): its bounds, and the value that changes nothing, for which cpa_sampling has 0. */
#define CPA_DRAWING_FIELDS(X)                                                                                          \
    X(float, temperature, 0, CPA_DRAWING_MOST, 0)                                                                      \
    X(int32_t, top_k, 0, INT32_MAX, 0)                                                                                 \
    X(float, top_p, 0, 1, 1)                                                                                           \
    X(float, min_p, 0, 1, 0)                                                                                           \
    X(float, repetition_penalty, 0, CPA_DRAWING_MOST, 1)                                                               \
    X(float, presence_penalty, -CPA_DRAWING_MOST, CPA_DRAWING_MOST, 0)                                                 \
    X(float, frequency_penalty, -CPA_DRAWING_MOST, CPA_DRAWING_MOST, 0)

/* The fields as members of a struct, by value and as arrays. */
#define CPA_DRAWING_MEMBER(type, field, least, most, none) type field;
#define CPA_DRAWING_ARRAY(type, field, least, most, none) type *field;

#endif
