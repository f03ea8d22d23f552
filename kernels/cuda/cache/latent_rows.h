/* Rows with scales of tiles, on the device: what kv_write and kv_convert leave to latent_rows.cu. */
#ifndef CPA_CUDA_LATENT_ROWS_H
#define CPA_CUDA_LATENT_ROWS_H

#include <cpattn/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* kv_write into a cache of such rows; the device is selected, and there are tokens. */
cpa_status cpa_cuda_latent_write(const cpa_kv_write_args *args, cpa_stream *stream);
/* kv_convert between caches of latents, one of which has such rows. The device is selected. */
cpa_status cpa_cuda_latent_convert(const cpa_kv_convert_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
