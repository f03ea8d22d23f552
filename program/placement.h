/* Where a rank runs: its device, and its share of the cores and of the memory of its host. */
#ifndef CPA_PROGRAM_PLACEMENT_H
#define CPA_PROGRAM_PLACEMENT_H

#include <stdint.h>

#include <cpattn/comm.h>
#include <cpattn/device.h>

#define CPA_PLACEMENT_MAX_CPUS 1024
#define CPA_PLACEMENT_GIVEN_WORDS (CPA_PLACEMENT_MAX_CPUS / (8 * sizeof(unsigned long)))
#define CPA_PLACEMENT_BOUND_BYTES 192

typedef struct cpa_rank_placement {
    int32_t ranks_here; /* ranks of the communicator on this host */
    int32_t rank_here;
    int32_t cores;                        /* that this job may use on this host */
    int32_t threads;                      /* of this rank */
    int32_t n_cpus;                       /* 0 = threads are not bound */
    int32_t cpus[CPA_PLACEMENT_MAX_CPUS]; /* operating-system numbers, one a core */
    int64_t memory_bytes;                 /* free memory of the device, or of the host divided by its ranks */
    cpa_backend backend;
    int32_t ordinal;                                /* of a CUDA device */
    int32_t wanted_threads;                         /* 0 = a thread a core */
    unsigned long given[CPA_PLACEMENT_GIVEN_WORDS]; /* the CPUs that the job was started on */
    int bind;
    char bound[CPA_PLACEMENT_BOUND_BYTES]; /* what this rank is bound to, as "CPUs 0-7, near the device"; or empty */
} cpa_rank_placement;

typedef enum cpa_device_choice { CPA_DEVICE_AUTO = 0, CPA_DEVICE_HOST, CPA_DEVICE_CUDA } cpa_device_choice;

/* Collective over `comm`. Divides the cores of each host among its ranks in contiguous shares of the same size; with
 * `bind`, and when there is a core for every rank, also restricts the process to its share. Cores outside the cgroup of
 * the job do not count, nor those that it was kept from when it was started (by taskset, by a batch system), nor more
 * of them than its CPU quota pays for; what mpirun binds each rank to is overruled. `threads` = 0 takes a thread a
 * core. */
cpa_status cpa_placement_find(cpa_comm *comm, int32_t threads, int bind, cpa_rank_placement *out, cpa_error *err);

/* Chooses the device of this rank after cpa_placement_find: the CUDA device with the number of the rank on its host, or
 * the only one that it sees (program/devices.h), or the host, which `auto` takes when there is no CUDA device. With a
 * CUDA device the cores are divided again: each rank takes its share of those near its device (program/cores.h); a
 * line of the log says which. Collective; fails on all ranks alike when a host has fewer CUDA devices than ranks. */
cpa_status cpa_placement_choose(cpa_comm *comm, cpa_device_choice choice, cpa_rank_placement *placement,
                                cpa_error *err);

/* How the device of this rank is opened. */
cpa_device_options cpa_placement_device(const cpa_rank_placement *placement);

#endif
