/* hash_rows on the host. A row of 16-bit letters e_0, e_1, ... adds the sum over i of mix(start + (i << 16 | e_i))
 * modulo 2^64, where mix is cpa_mix64 and start = mix(salts[row] xor (salt + 1) * CPA_GOLDEN). Any order of summing
 * gives the same value, so that a device may do it in parallel. */
#include "base/hash.h"
#include "kernels/host/device/host.h"
#include "kernels/operators.h"

cpa_status cpa_host_hash_rows(const cpa_hash_rows_args *args, cpa_stream *stream) {
    (void)stream;
    uint64_t total = 0;
    for (int64_t r = 0; r < args->rows; r++) {
        if (args->row_index[r] < 0) continue;
        const uint16_t *row = (const uint16_t *)args->src + args->row_index[r] * (args->row_bytes / 2);
        uint64_t start = cpa_mix64(args->salts[r] ^ (args->salt + 1) * CPA_GOLDEN);
        uint64_t sum = 0;
        int nonfinite = 0;
        for (int64_t i = 0; i < args->row_bytes / 2; i++) {
            sum += cpa_mix64(start + ((uint64_t)i << 16 | row[i]));
            nonfinite |= cpa_letter_is_nonfinite(args->dtype, i, row[i]);
        }
        if (args->nonfinite && nonfinite) args->nonfinite[args->row_index[r]] = 1;
        if (args->sums) args->sums[r] += sum;
        total += sum;
    }
    *args->sum += total;
    return CPA_OK;
}
