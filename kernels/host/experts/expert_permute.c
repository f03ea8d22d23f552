/* expert_permute: a counting sort. */
#include "kernels/host/nn/nn.h"

cpa_status cpa_host_expert_permute(const cpa_expert_permute_args *args, cpa_stream *stream) {
    const int64_t choices = args->rows * args->top_k;
    int32_t next[CPA_MOST_EXPERTS] = {0}; /* how many an expert has, then where its next one goes */
    int32_t placed = 0;
    (void)stream;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t e = (int64_t)args->ids[i] - args->first_expert;
        if (e >= 0 && e < args->experts) next[e]++;
    }
    for (int32_t e = 0; e < args->experts; e++) {
        const int32_t count = next[e];
        args->offsets[e] = next[e] = placed;
        placed += count;
    }
    args->offsets[args->experts] = placed;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t e = (int64_t)args->ids[i] - args->first_expert;
        args->places[i] = -1;
        if (e < 0 || e >= args->experts) continue;
        args->places[i] = next[e]++;
        args->tokens[args->places[i]] = (uint32_t)(i / args->top_k);
    }
    for (int64_t i = placed; i < choices; i++) args->tokens[i] = UINT32_MAX;
    return CPA_OK;
}
