/* embed: rows of a table, by token. */
#include <math.h>

#include "base/convert.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"

cpa_status cpa_host_embed(const cpa_embed_args *args, cpa_stream *stream) {
    const size_t row_bytes = (size_t)(args->width * cpa_dtype_bytes(args->dtype));
    const float nan = NAN;
    (void)stream;
    for (int64_t i = 0; i < args->rows; i++) {
        char *out = (char *)args->out + (size_t)i * row_bytes;
        if (args->tokens[i] < args->vocabulary) {
            memcpy(out, (const char *)args->table + args->tokens[i] * row_bytes, row_bytes);
            continue;
        }
        const int64_t bytes = cpa_dtype_bytes(args->dtype);
        for (int32_t e = 0; e < args->width; e++) cpa_narrow(out + e * bytes, &nan, args->dtype, 1);
    }
    return CPA_OK;
}
