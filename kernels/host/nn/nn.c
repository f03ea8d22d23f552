/* The table of operators beside attention. */
#include "kernels/host/nn/nn.h"

#include "base/check.h"

/* An entry of the table that has no code yet. */
#define UNSUPPORTED(operation)                                                                                         \
    static cpa_status operation(const cpa_##operation##_args *args, cpa_stream *stream) {                              \
        (void)args;                                                                                                    \
        return cpa_fail(&stream->error, CPA_UNSUPPORTED, #operation ": not on the host yet");                          \
    }

UNSUPPORTED(linear)
UNSUPPORTED(sample)

const cpa_nn_table cpa_host_nn = {
    .rmsnorm = cpa_host_rmsnorm,
    .qk_norm_rope = cpa_host_qk_norm_rope,
    .swiglu = cpa_host_swiglu,
    .embed = cpa_host_embed,
    .linear = linear,
    .sample = sample,
    .mark_tokens = cpa_host_mark_tokens,
};
