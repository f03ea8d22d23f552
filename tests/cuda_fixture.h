/* A CUDA device for tests, and copies of host inputs on it. Functions abort on a failure that no test is about. */
#ifndef CPA_TESTS_CUDA_FIXTURE_H
#define CPA_TESTS_CUDA_FIXTURE_H

#include "device_fixture.h"
#include "kernels/cuda/cuda.h"

typedef struct cpa_cuda_site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_cuda_path best; /* of the device */
} cpa_cuda_site;

/* Opens the first device; 0, and a line that says why, if there is none. */
int cpa_cuda_site_open(cpa_cuda_site *site);
void cpa_cuda_site_close(cpa_cuda_site *site);
/* Which kernels attend may use from now on; at most site->best. */
void cpa_cuda_site_use(cpa_cuda_site *site, cpa_cuda_path path);
const char *cpa_cuda_path_name(cpa_cuda_path path);

/* A copy of host memory on the device; cpa_device_free it. */
void *cpa_cuda_upload(cpa_cuda_site *site, const void *host, int64_t bytes);
/* Waits for the stream, then copies back. */
void cpa_cuda_download(cpa_cuda_site *site, void *host, const void *device, int64_t bytes);

/* The cache of a view on the device. */
cpa_kv_view cpa_cuda_upload_view(cpa_cuda_site *site, const cpa_kv_view *host, int64_t k_bytes, int64_t v_bytes);
void cpa_cuda_free_view(cpa_cuda_site *site, const cpa_kv_view *view);

#endif
