#include "kernels/host/attend/attend_score.h"

#include <math.h>

#include "base/min_max.h"

cpa_attend_score_job cpa_attend_score_of(const cpa_attend_args *args, int32_t group) {
    cpa_attend_score_job job = {.selects = cpa_attend_selects_of(args->selection), .group = group};
    if (args->rules) job.rules = *args->rules;
    if (args->selection && args->selection->bits) job.bits = *args->selection->bits;
    if (args->bias && args->bias->width > 0) job.bias = *args->bias;
    job.transforms =
        job.rules.softcap > 0 || job.rules.temperature_len > 0 || job.rules.alibi_slopes || job.bias.values;
    job.has_bits = job.bits.bits != NULL;
    job.indices = job.has_bits || job.selects.any || job.rules.alibi_slopes || job.bias.values;
    return job;
}

static float temperature_of(const cpa_score_rules *rules, int64_t index) {
    if (rules->temperature_len == 0 || (double)index <= (double)rules->temperature_len) return 1;
    return (float)(log2((double)index) / log2((double)rules->temperature_len));
}

cpa_attend_row_score cpa_attend_row_score_of(const cpa_attend_score_job *job, int64_t row, int32_t head,
                                             int64_t index) {
    cpa_attend_row_score score = {.index = index, .factor = temperature_of(&job->rules, index)};
    if (job->rules.softcap > 0) score.factor *= job->rules.softcap;
    if (job->rules.alibi_slopes) score.slope = job->rules.alibi_slopes[head];
    if (job->bias.values) {
        const int64_t of = job->bias.row_map ? job->bias.row_map[row] : row;
        score.bias = (const char *)job->bias.values +
                     (of * job->bias.row_stride + head * job->bias.head_stride) * cpa_dtype_bytes(job->bias.dtype);
    }
    if (job->selects.any) score.keys = cpa_attend_row_keys_of(&job->selects, row, head, head / job->group);
    if (job->has_bits) {
        const int64_t of = job->bits.row_map ? job->bits.row_map[row] : row;
        if (job->bits.row_word[of] >= 0) {
            score.bits = job->bits.bits + job->bits.row_word[of];
            score.bits_first = job->bits.first[of];
            score.bits_end = score.bits_first + job->bits.width[of];
        }
    }
    return score;
}

void cpa_attend_index_keys(cpa_owner_map map, cpa_token_set set, int64_t key, int64_t *key_index, int32_t *key_after) {
    for (int64_t i = 0; i < CPA_ATTEND_TILE; i++) {
        key_index[i] = cpa_token_index(map, set, key + i);
        key_after[i] = (int32_t)cpa_min64(key_index[i] - key_index[0], INT32_MAX / 2);
    }
}

float cpa_attend_sink_factor(float lse, float sink) {
    return lse == -INFINITY ? 1 : 1 / (1 + expf(sink - lse));
}
