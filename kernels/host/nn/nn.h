/* The operators beside attention, an operation a file: cpa_host_<name>. */
#ifndef CPA_HOST_NN_H
#define CPA_HOST_NN_H

#include "kernels/nn.h"

extern const cpa_nn_table cpa_host_nn;

#define CPA_HOST_NN_DECLARE(name) cpa_status cpa_host_##name(const cpa_##name##_args *args, cpa_stream *stream);
CPA_NN_OPERATORS(CPA_HOST_NN_DECLARE)
#undef CPA_HOST_NN_DECLARE

#endif
