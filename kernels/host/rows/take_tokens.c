/* take_tokens on the host. */
#include "kernels/host/device/host.h"
#include "kernels/operators.h"

cpa_status cpa_host_take_tokens(const cpa_take_tokens_args *args, cpa_stream *stream) {
    (void)stream;
    for (int64_t row = 0; row < args->rows; row++)
        if (args->sources[row] >= 0) args->tokens[row] = args->ids[(int64_t)args->sources[row] * args->id_stride];
    return CPA_OK;
}
