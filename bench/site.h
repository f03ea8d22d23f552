/* What a benchmark runs on. */
#ifndef CPA_BENCH_SITE_H
#define CPA_BENCH_SITE_H

#include <stdbool.h>

#include <cpattn/device.h>
#include <cpattn/engine.h>

#include "bench/options.h"
#include "comm/comm.h"

typedef struct cpa_bench_site {
    int argc; /* the words of the command from "bench" on */
    char *const *argv;
    cpa_bench_options options; /* options of the case that runs */
    cpa_control control;
    cpa_backend backend;
    cpa_device *device;
    cpa_stream *stream;
    /* Transport that the program would use here; set where a benchmark needs it. */
    const cpa_transport_table *transport;
    const cpa_link *links; /* [ranks, ranks], what joins them, without rates; set with the transport */
    double read_bandwidth; /* bytes/s of reading device memory, measured in this run */
    double copy_bandwidth; /* bytes/s of copying device memory, read and written */
    double link_bandwidth; /* bytes/s of copying page-locked host memory to the device; 0: not measured */
    double launch_s;       /* time to launch a kernel that does nothing, in a batch of them; 0 on the host */
    void *probe;           /* memory of the two measurements, kept to the end (bench/memory.c) */
    void *host_probe;      /* page-locked, while the link is measured */
    int64_t memory_bytes;  /* device memory that was free at the start, bytes */
    bool shares_cores;     /* the ranks of this host have more threads than it has cores for them */
} cpa_bench_site;

#endif
