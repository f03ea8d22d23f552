#include "device_fixture.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#ifdef CPA_HAVE_CUDA
#include "kernels/cuda/cuda.h"
#endif

static const char *device_name(void) {
    const char *name = getenv("CPATTN_TEST_DEVICE");
    return name && name[0] ? name : "host";
}

/* The portable kernels, with as much shared memory for a CTA as the smallest devices have. */
static const char SMALL[] = "cuda:small";
enum { SMALL_SHARED_BYTES = 99 << 10 };

static int is_cuda(void) {
    return strncmp(device_name(), "cuda", 4) == 0;
}

/* The kernels in the name of the device, as a number of cpa_cuda_path; -1 = the best of the device, -2 = bad name. */
static int forced_path(void) {
    static const char *const names[] = {"cuda:simple", "cuda:portable", "cuda:hopper"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(device_name(), names[i]) == 0) return i;
    }
    if (strcmp(device_name(), SMALL) == 0) return 1;
    return strcmp(device_name(), "cuda") == 0 || strcmp(device_name(), "host") == 0 ? -1 : -2;
}

static int world_rank(void) {
    int started = 0, rank = 0;
    MPI_Initialized(&started);
    if (started) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "%s\n", message);
    abort();
}

#ifdef CPA_HAVE_CUDA
/* Holds attend to the kernels that are named; 0 if the device does not have them. */
static int force_path(cpa_device *device) {
    cpa_cuda_device *cuda = (cpa_cuda_device *)device;
    _Static_assert(CPA_CUDA_SIMPLE == 0 && CPA_CUDA_PORTABLE == 1 && CPA_CUDA_HOPPER == 2, "the order of forced_path");
    int path = forced_path();
    if (path > (int)cuda->path) return 0;
    if (path >= 0) cuda->path = (cpa_cuda_path)path;
    if (strcmp(device_name(), SMALL) == 0) cuda->shared_bytes = SMALL_SHARED_BYTES;
    return 1;
}
#endif

/* Whether the device can be opened and has the kernels that are named; otherwise `why` says so. */
static int is_there(char *why, size_t bytes) {
    cpa_device_options options = cpa_test_device_options(1);
    cpa_device *device = NULL;
    cpa_error err = {.message = ""};
    int found = 1;
    if (cpa_device_open(&options, &device, &err) != CPA_OK) {
        snprintf(why, bytes, "%s", err.message);
        return 0;
    }
#ifdef CPA_HAVE_CUDA
    found = force_path(device);
    if (!found) snprintf(why, bytes, "%s has no kernels for %s", cpa_device_description(device), device_name());
#endif
    cpa_device_close(device);
    return found;
}

int cpa_test_device_missing(void) {
    char why[512];
    if (forced_path() == -2) {
        fprintf(stderr, "CPATTN_TEST_DEVICE: found '%s', expected host, cuda, or cuda:simple, :portable or :hopper\n",
                device_name());
        return 2;
    }
    if (!is_cuda()) return 0;
    if (cpa_device_count(CPA_BACKEND_CUDA) == 0) {
        snprintf(why, sizeof why, "no CUDA device");
    } else if (is_there(why, sizeof why)) {
        return 0;
    }
    if (world_rank() == 0) printf("skipped: %s\n", why);
    return 1;
}

int cpa_test_cuda_missing(void) {
    if (is_cuda()) return cpa_test_device_missing();
    if (world_rank() == 0) printf("skipped: CPATTN_TEST_DEVICE: found '%s', expected cuda\n", device_name());
    return 1;
}

cpa_device_options cpa_test_device_options(int32_t threads) {
    cpa_device_options options = {.size = sizeof options, .threads = threads};
    if (is_cuda()) {
        options.backend = CPA_BACKEND_CUDA;
        options.ordinal = world_rank() % cpa_device_count(CPA_BACKEND_CUDA);
    }
    return options;
}

void cpa_test_device_open(int32_t threads, cpa_device **device, cpa_stream **stream) {
    cpa_device_options options = cpa_test_device_options(threads);
    cpa_error err = {.message = ""};
    require(cpa_device_open(&options, device, &err), err.message);
#ifdef CPA_HAVE_CUDA
    if (is_cuda() && !force_path(*device)) abort();
#endif
    require(cpa_stream_create(*device, stream, &err), err.message);
}

void cpa_test_device_close(cpa_device *device, cpa_stream *stream) {
    cpa_stream_destroy(stream);
    cpa_device_close(device);
}

int cpa_test_promises_bits(void) {
    return !is_cuda();
}

void *cpa_test_upload(cpa_stream *stream, const void *host, int64_t bytes) {
    cpa_error err = {.message = ""};
    void *memory = NULL;
    require(cpa_device_alloc(stream->device, bytes, &memory, &err), err.message);
    require(stream->device->kernels->copy(memory, host, bytes, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream));
    return memory;
}

void cpa_test_download(cpa_stream *stream, void *host, const void *device, int64_t bytes) {
    require(cpa_stream_sync(stream), cpa_stream_error(stream));
    require(stream->device->kernels->copy(host, device, bytes, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream));
}

void cpa_test_free(cpa_stream *stream, void *device) {
    cpa_device_free(stream->device, device);
}
