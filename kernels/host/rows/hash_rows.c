/* hash_rows on the host. A row of 16-bit letters e_0, e_1, ... adds the sum over i of mix(start + (i << 16 | e_i))
 * modulo 2^64, where mix is cpa_mix64 and start = mix(salts[row] xor (salt + 1) * CPA_GOLDEN). Any order of summing
 * gives the same value, so that a device may do it in parallel. */
#include "base/hash.h"
#include "kernels/host/device/host.h"
#include "kernels/operators.h"

static uint64_t hash_layer(const cpa_hash_rows_args *args, int32_t layer) {
    const char *src = (const char *)args->src + layer * args->layer_bytes;
    uint8_t *marks = args->nonfinite ? args->nonfinite + layer * args->layer_marks : NULL;
    uint64_t total = 0;
    for (int64_t r = 0; r < args->rows; r++) {
        if (args->row_index[r] < 0) continue;
        const uint16_t *row = (const uint16_t *)(src + args->row_index[r] * args->row_bytes);
        uint64_t start = cpa_mix64(args->salts[r] ^ (args->salt + (uint64_t)layer + 1) * CPA_GOLDEN);
        uint64_t sum = 0;
        int nonfinite = 0;
        for (int64_t i = 0; i < args->row_bytes / 2; i++) {
            sum += cpa_mix64(start + ((uint64_t)i << 16 | row[i]));
            nonfinite |= cpa_letter_is_nonfinite(args->dtype, i, row[i]);
        }
        if (marks && nonfinite) marks[args->row_index[r]] = 1;
        if (args->sums) args->sums[r] += sum;
        total += sum;
    }
    return total;
}

cpa_status cpa_host_hash_rows(const cpa_hash_rows_args *args, cpa_stream *stream) {
    (void)stream;
    for (int32_t layer = 0; layer < args->layers; layer++) *args->sum += hash_layer(args, layer);
    return CPA_OK;
}
