#include "bench/memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "bench/cuda.h"
#include "kernels/device.h"

enum { PASSES = 5, CALLS_PER_PASS = 10, LAUNCHES_PER_PASS = 2000 };
/* Larger than the last-level cache of any host or device. */
static const int64_t host_probe_bytes = (int64_t)128 << 20, cuda_probe_bytes = (int64_t)2 << 30;
static const int64_t link_probe_bytes = (int64_t)64 << 20;
static const int64_t cold_bytes = (int64_t)256 << 20, poison_piece = (int64_t)4 << 20;

cpa_status cpa_bench_enqueued(const cpa_bench_site *site, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_stream_error(site->stream));
}

cpa_status cpa_bench_copy(cpa_bench_site *site, void *dst, const void *src, int64_t bytes, cpa_error *err) {
    CPA_TRY(cpa_bench_enqueued(site, site->device->table->copy(dst, src, bytes, site->stream), err));
    return cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err);
}

cpa_status cpa_bench_upload(cpa_bench_site *site, const void *src, int64_t bytes, void **out, cpa_error *err) {
    CPA_TRY(cpa_device_alloc(site->device, bytes, out, err));
    return cpa_bench_copy(site, *out, src, bytes, err);
}

cpa_status cpa_bench_replicate(cpa_bench_site *site, void *memory, int64_t period, int64_t bytes, cpa_error *err) {
    for (int64_t done = period; done < bytes; done *= 2) {
        int64_t n = bytes - done < done ? bytes - done : done;
        CPA_TRY(cpa_bench_copy(site, (char *)memory + done, memory, n, err));
    }
    return CPA_OK;
}

cpa_status cpa_bench_upload_period(cpa_bench_site *site, const void *src, int64_t period, int64_t bytes, void **out,
                                   cpa_error *err) {
    CPA_TRY(cpa_device_alloc(site->device, bytes, out, err));
    CPA_TRY(cpa_bench_copy(site, *out, src, period, err));
    return cpa_bench_replicate(site, *out, period, bytes, err);
}

cpa_status cpa_bench_poisoned(cpa_bench_site *site, int64_t bytes, void **out, cpa_error *err) {
    int64_t piece = bytes < poison_piece ? bytes : poison_piece;
    void *poison = malloc((size_t)piece);
    if (!poison) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory");
    memset(poison, CPA_BENCH_POISON, (size_t)piece);
    cpa_status status;
    CPA_TRY_GOTO(cpa_device_alloc(site->device, bytes, out, err), done);
    CPA_TRY_GOTO(cpa_bench_copy(site, *out, poison, piece, err), done);
    status = cpa_bench_replicate(site, *out, piece, bytes, err);
done:
    free(poison);
    return status;
}

int64_t cpa_bench_copies(const cpa_bench_site *site, int64_t bytes) {
    return site->backend == CPA_BACKEND_HOST || bytes >= cold_bytes ? 1 : (cold_bytes + bytes - 1) / bytes;
}

/* memchr looks at every byte with the widest loads of the CPU. */
static cpa_status read_once(cpa_bench_site *site, int64_t bytes, cpa_error *err) {
    if (site->backend == CPA_BACKEND_CUDA) return cpa_bench_cuda_read(site->probe, bytes, site->stream, err);
    const void *volatile found = memchr(site->probe, 2, (size_t)bytes);
    return found ? cpa_fail(err, CPA_INTERNAL, "bench: the probe's memory changed") : CPA_OK;
}

static cpa_status copy_once(cpa_bench_site *site, int64_t bytes, cpa_error *err) {
    char *src = site->probe;
    return cpa_bench_enqueued(site, site->device->table->copy(src + bytes, src, bytes, site->stream), err);
}

typedef cpa_status (*probe_fn)(cpa_bench_site *site, int64_t bytes, cpa_error *err);

/* The best time of a call over the passes; the first pass warms up. */
static cpa_status time_probe(cpa_bench_site *site, probe_fn probe, int64_t bytes, int calls, double *seconds,
                             cpa_error *err) {
    for (int pass = 0; pass < PASSES; pass++) {
        double start = cpa_clock_now();
        for (int i = 0; i < calls; i++) CPA_TRY(probe(site, bytes, err));
        CPA_TRY(cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err));
        double elapsed = (cpa_clock_now() - start) / calls;
        if (pass <= 1 || elapsed < *seconds) *seconds = elapsed;
    }
    return CPA_OK;
}

cpa_status cpa_bench_measure_bandwidth(cpa_bench_site *site, cpa_error *err) {
    bool cuda = site->backend == CPA_BACKEND_CUDA;
    int64_t bytes = cuda ? cuda_probe_bytes : host_probe_bytes;
    int calls = cuda ? CALLS_PER_PASS : 1;
    double read_s, copy_s;
    CPA_TRY(cpa_device_alloc(site->device, 2 * bytes, &site->probe, err));
    const int32_t ones = 0x01010101;
    CPA_TRY(cpa_bench_copy(site, site->probe, &ones, sizeof ones, err));
    CPA_TRY(cpa_bench_replicate(site, site->probe, sizeof ones, 2 * bytes, err));
    CPA_TRY(time_probe(site, read_once, bytes, calls, &read_s, err));
    CPA_TRY(time_probe(site, copy_once, bytes, calls, &copy_s, err));
    if (cuda) CPA_TRY(time_probe(site, read_once, 0, LAUNCHES_PER_PASS, &site->launch_s, err));
    site->read_bandwidth = (double)bytes / read_s;
    site->copy_bandwidth = 2.0 * (double)bytes / copy_s;
    return CPA_OK;
}

static cpa_status link_once(cpa_bench_site *site, int64_t bytes, cpa_error *err) {
    return cpa_bench_enqueued(site, site->device->table->copy(site->probe, site->host_probe, bytes, site->stream), err);
}

cpa_status cpa_bench_measure_link(cpa_bench_site *site, cpa_error *err) {
    const cpa_device_table *table = site->device->table;
    double seconds;
    CPA_TRY(table->alloc_host(site->device, link_probe_bytes, &site->host_probe, err));
    memset(site->host_probe, 1, (size_t)link_probe_bytes);
    const cpa_status status = time_probe(site, link_once, link_probe_bytes, 1, &seconds, err);
    table->free_host(site->device, site->host_probe);
    site->host_probe = NULL;
    if (status == CPA_OK) site->link_bandwidth = (double)link_probe_bytes / seconds;
    return status;
}

void cpa_bench_release_probe(cpa_bench_site *site) {
    cpa_device_free(site->device, site->probe);
    site->probe = NULL;
}
