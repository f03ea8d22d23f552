/* Rows of the CPA_TQ_ dtypes, on the device: what kv_write, kv_convert and kv_gather leave to turboquant_rows.cu. */
#ifndef CPA_CUDA_TURBOQUANT_ROWS_H
#define CPA_CUDA_TURBOQUANT_ROWS_H

#include "kernels/cuda/cache/kv_convert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* kv_write into a cache of such rows; the device is selected, and there are tokens. */
cpa_status cpa_cuda_turboquant_write(const cpa_kv_write_args *args, cpa_stream *stream);
/* cpa_cuda_kv_move_tokens where one of the views, which are resolved, has such rows. */
cpa_status cpa_cuda_turboquant_move(const cpa_kv_view *src, const cpa_kv_view *dst, const cpa_cuda_block_move *moves,
                                    int64_t n, int keep_bits, const char *operation, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
