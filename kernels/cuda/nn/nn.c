/* The table of operators beside attention. */
#include "kernels/cuda/nn/nn.h"

#include "base/check.h"

/* An entry of the table that has no kernel yet. */
#define UNSUPPORTED(operation)                                                                                         \
    static cpa_status operation(const cpa_##operation##_args *args, cpa_stream *stream) {                              \
        (void)args;                                                                                                    \
        return cpa_fail(&stream->error, CPA_UNSUPPORTED, #operation ": not on CUDA devices yet");                      \
    }

UNSUPPORTED(rmsnorm)
UNSUPPORTED(qk_norm_rope)
UNSUPPORTED(swiglu)
UNSUPPORTED(embed)
UNSUPPORTED(linear)
UNSUPPORTED(sample)
UNSUPPORTED(mark_tokens)

const cpa_nn_table cpa_cuda_nn = {
    .rmsnorm = rmsnorm,
    .qk_norm_rope = qk_norm_rope,
    .swiglu = swiglu,
    .embed = embed,
    .linear = linear,
    .sample = sample,
    .mark_tokens = mark_tokens,
};
