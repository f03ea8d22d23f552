#include "cuda_fixture.h"

#include <stdio.h>
#include <stdlib.h>

static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "%s\n", message);
    abort();
}

int cpa_cuda_site_open(cpa_cuda_site *site) {
    cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_CUDA};
    cpa_error err = {0};
    if (cpa_kernels_cuda.device_open(&options, &site->device, &err) != CPA_OK) {
        printf("skipped: %s\n", err.message);
        return 0;
    }
    require(cpa_stream_create(site->device, &site->stream, &err), err.message);
    site->best = ((cpa_cuda_device *)site->device)->path;
    printf("%s\n", cpa_device_description(site->device));
    return 1;
}

void cpa_cuda_site_close(cpa_cuda_site *site) {
    cpa_stream_destroy(site->stream);
    cpa_device_close(site->device);
}

void cpa_cuda_site_use(cpa_cuda_site *site, cpa_cuda_path path) {
    ((cpa_cuda_device *)site->device)->path = path;
}

const char *cpa_cuda_path_name(cpa_cuda_path path) {
    return path == CPA_CUDA_SIMPLE ? "simple" : path == CPA_CUDA_PORTABLE ? "portable" : "hopper";
}

void *cpa_cuda_upload(cpa_cuda_site *site, const void *host, int64_t bytes) {
    cpa_error err = {0};
    void *memory = NULL;
    require(cpa_device_alloc(site->device, bytes, &memory, &err), err.message);
    require(site->device->kernels->copy(memory, host, bytes, site->stream), cpa_stream_error(site->stream));
    require(cpa_stream_sync(site->stream), cpa_stream_error(site->stream));
    return memory;
}

void cpa_cuda_download(cpa_cuda_site *site, void *host, const void *device, int64_t bytes) {
    require(site->device->kernels->copy(host, device, bytes, site->stream), cpa_stream_error(site->stream));
    require(cpa_stream_sync(site->stream), cpa_stream_error(site->stream));
}

cpa_kv_view cpa_cuda_upload_view(cpa_cuda_site *site, const cpa_kv_view *host, int64_t k_bytes, int64_t v_bytes) {
    cpa_kv_view view = *host;
    view.k = cpa_cuda_upload(site, host->k, k_bytes);
    view.v = cpa_cuda_upload(site, host->v, v_bytes);
    return view;
}

void cpa_cuda_free_view(cpa_cuda_site *site, const cpa_kv_view *view) {
    cpa_device_free(site->device, view->k);
    cpa_device_free(site->device, view->v);
}
