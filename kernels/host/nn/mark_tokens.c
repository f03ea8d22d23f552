/* mark_tokens: which tokens are in the prompts and in the outputs of sequences, and how often in these. */
#include <string.h>

#include "kernels/host/nn/nn.h"

cpa_status cpa_host_mark_tokens(const cpa_mark_tokens_args *args, cpa_stream *stream) {
    const int64_t words = (args->vocabulary + 31) / 32;
    (void)stream;
    for (int64_t i = 0; i < args->n_restarts; i++) {
        const int64_t sequence = args->restarts[i];
        if (sequence < 0 || sequence >= args->sequences) continue;
        memset(args->in_prompt + sequence * words, 0, (size_t)words * sizeof *args->in_prompt);
        memset(args->in_output + sequence * words, 0, (size_t)words * sizeof *args->in_output);
        if (args->output_counts)
            memset(args->output_counts + sequence * args->vocabulary, 0,
                   (size_t)args->vocabulary * sizeof *args->output_counts);
    }
    for (int64_t i = 0; i < args->count; i++) {
        const int64_t sequence = args->sequence[i], token = args->tokens[i];
        if (sequence < 0 || sequence >= args->sequences || token >= args->vocabulary) continue;
        uint32_t *bits = args->outputs[i] ? args->in_output : args->in_prompt;
        bits[sequence * words + token / 32] |= (uint32_t)1 << token % 32;
        if (args->outputs[i] && args->output_counts) args->output_counts[sequence * args->vocabulary + token]++;
    }
    return CPA_OK;
}
