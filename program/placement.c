#include "program/placement.h"

#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/check.h"
#include "comm/comm.h"
#include "program/cores.h"
#include "program/devices.h"
#include "program/parent.h"

/* The PCI address of the device of each rank of this host. */
typedef const char (*pci_list)[CPA_PCI_ADDRESS_BYTES];

/* Chooses the cores of this rank; pci is NULL on the host back end. */
static int32_t choose_cores(hwloc_topology_t topology, pci_list pci, const cpa_rank_placement *placement,
                            hwloc_bitmap_t cores, int *near_device) {
    int32_t n = placement->ranks_here, chosen = 0;
    hwloc_bitmap_t *near = calloc((size_t)n, sizeof *near);
    int enough = near != NULL;
    for (int32_t r = 0; r < n && enough; r++) {
        near[r] = hwloc_bitmap_alloc();
        enough = near[r] != NULL;
        if (enough && pci) cpa_cores_near(topology, pci[r], near[r]);
    }
    if (enough) chosen = cpa_cores_share(topology, near, n, placement->rank_here, cores, near_device);
    for (int32_t r = 0; near && r < n; r++) hwloc_bitmap_free(near[r]);
    free(near);
    return chosen;
}

/* The CPUs of the cores in a set, one a core. */
static void list_cpus(hwloc_topology_t topology, hwloc_const_bitmap_t cores, cpa_rank_placement *out) {
    int32_t count = hwloc_get_nbobjs_inside_cpuset_by_type(topology, cores, HWLOC_OBJ_CORE);
    out->n_cpus = 0;
    for (int32_t i = 0; i < count && i < CPA_PLACEMENT_MAX_CPUS; i++) {
        hwloc_obj_t core = hwloc_get_obj_inside_cpuset_by_type(topology, cores, HWLOC_OBJ_CORE, (unsigned)i);
        out->cpus[out->n_cpus++] = hwloc_bitmap_first(core->cpuset);
    }
}

/* Fills cores, threads and cpus from what hwloc finds; leaves them alone if it finds nothing. */
static void divide_cores(hwloc_topology_t topology, pci_list pci, cpa_rank_placement *out) {
    int32_t found = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
    int32_t quota = cpa_cgroup_cores();
    hwloc_bitmap_t share = hwloc_bitmap_alloc();
    if (found < 1 || !share) {
        hwloc_bitmap_free(share);
        return;
    }
    int near_device = 0;
    out->cores = quota > 0 && quota < found ? quota : found;
    int32_t each = choose_cores(topology, pci, out, share, &near_device);
    if (out->cores < found) each = out->cores / out->ranks_here;
    out->threads = out->wanted_threads > 0 ? out->wanted_threads : each > 0 ? each : 1;
    out->n_cpus = 0;
    out->bound[0] = 0;
    /* With a quota the scheduler of the host decides which cores serve it. */
    if (out->bind && each > 0 && out->threads <= each && out->cores == found) {
        char list[CPA_PLACEMENT_BOUND_BYTES - 32];
        hwloc_bitmap_list_snprintf(list, sizeof list, share);
        list_cpus(topology, share, out);
        if (hwloc_set_cpubind(topology, share, HWLOC_CPUBIND_PROCESS) != 0) out->n_cpus = 0;
        if (out->n_cpus)
            snprintf(out->bound, sizeof out->bound, "CPUs %s%s", list, near_device ? ", near the device" : "");
    }
    hwloc_bitmap_free(share);
}

/* The topology of this host; NULL where hwloc cannot read it. */
static hwloc_topology_t load_topology(void) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0) return NULL;
    if (hwloc_topology_load(topology) == 0) return topology;
    hwloc_topology_destroy(topology);
    return NULL;
}

/* Restricts the topology to what the job was given, and this rank to its share of that. */
static void bind_rank(hwloc_topology_t topology, pci_list pci, cpa_rank_placement *out) {
    hwloc_bitmap_t given = hwloc_bitmap_alloc();
    if (given && hwloc_bitmap_from_ulongs(given, CPA_PLACEMENT_GIVEN_WORDS, out->given) == 0)
        (void)hwloc_topology_restrict(topology, given, 0); /* leaves it as it is where they have no CPU in common */
    hwloc_bitmap_free(given);
    divide_cores(topology, pci, out);
}

/* The CPUs of this process before mpirun bound it: its own, or those of mpirun. Returns 0 where that is not known. */
static int find_given(hwloc_topology_t topology, unsigned long given[CPA_PLACEMENT_GIVEN_WORDS]) {
    int under_mpirun = getenv("OMPI_COMM_WORLD_SIZE") != NULL;
    if (under_mpirun && !cpa_parent_of_mpi()) return 0;
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
    int known = cpus && hwloc_get_proc_cpubind(topology, under_mpirun ? getppid() : getpid(), cpus, 0) == 0 &&
                hwloc_bitmap_to_ulongs(cpus, CPA_PLACEMENT_GIVEN_WORDS, given) == 0;
    hwloc_bitmap_free(cpus);
    return known;
}

/* What the ranks of this host say, in their order: `bytes` bytes of each at `all`, which has room for every rank. */
static cpa_status gather_here(cpa_control *control, const void *mine, int64_t bytes, void *all, cpa_error *err) {
    CPA_TRY(cpa_control_all_gather(control, mine, bytes, all, err));
    int32_t n = 0;
    for (int32_t rank = 0; rank < control->size; rank++) {
        if (!cpa_control_is_here(control, rank)) continue;
        memmove((char *)all + n++ * bytes, (char *)all + rank * bytes, (size_t)bytes);
    }
    return CPA_OK;
}

/* The CPUs that any rank of this host was given. */
static cpa_status join_given(cpa_control *control, int32_t ranks_here, unsigned long *given, cpa_error *err) {
    unsigned long(*all)[CPA_PLACEMENT_GIVEN_WORDS] = calloc((size_t)control->size, sizeof *all);
    cpa_status status =
        all ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the CPUs of %d ranks", control->size);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), done);
    CPA_TRY_GOTO(gather_here(control, given, sizeof *all, all, err), done);
    for (int32_t r = 0; r < ranks_here; r++) {
        for (size_t i = 0; i < CPA_PLACEMENT_GIVEN_WORDS; i++) given[i] |= all[r][i];
    }
done:
    free(all);
    return status;
}

cpa_status cpa_placement_find(cpa_comm *comm, int32_t threads, int bind, cpa_rank_placement *out, cpa_error *err) {
    cpa_control control;
    *out =
        (cpa_rank_placement){.cores = 1, .threads = threads > 0 ? threads : 1, .wanted_threads = threads, .bind = bind};
    CPA_TRY(cpa_control_open(comm, &control, err));
    CPA_TRY(cpa_control_find_host(&control, err));
    out->ranks_here = control.ranks_here;
    out->rank_here = control.rank_here;
    hwloc_topology_t topology = load_topology();
    if (!topology || !find_given(topology, out->given)) memset(out->given, 0xff, sizeof out->given);
    cpa_status status = join_given(&control, out->ranks_here, out->given, err);
    cpa_control_close(&control);
    if (status == CPA_OK && topology) bind_rank(topology, NULL, out);
    if (topology) hwloc_topology_destroy(topology);
    out->memory_bytes = cpa_cgroup_memory() / out->ranks_here;
    return status;
}

/* Binds this rank again, to the cores near its device. */
static cpa_status move_to_device(cpa_control *control, cpa_rank_placement *placement, cpa_error *err) {
    char(*pci)[CPA_PCI_ADDRESS_BYTES] = calloc((size_t)control->size, sizeof *pci);
    char mine[CPA_PCI_ADDRESS_BYTES] = "";
    cpa_device_pci_address(placement->backend, placement->ordinal, mine);
    cpa_status status = pci ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for %d addresses", control->size);
    status = cpa_control_agree(control, status, err);
    if (status == CPA_OK) status = gather_here(control, mine, sizeof mine, pci, err);
    if (status == CPA_OK) {
        hwloc_topology_t topology = load_topology(); /* whole again: the last one was restricted */
        if (topology) {
            bind_rank(topology, (pci_list)pci, placement);
            hwloc_topology_destroy(topology);
        }
    }
    free(pci);
    CPA_TRY(status);
    cpa_log(CPA_LOG_INFO, "cuda %d at %s: %s", placement->ordinal, mine[0] ? mine : "an unknown PCI address",
            placement->bound[0] ? placement->bound : "not bound to cores");
    return CPA_OK;
}

static cpa_status too_few_devices(int32_t devices, int32_t ranks, cpa_error *err) {
#ifndef CPA_HAVE_CUDA
    return cpa_fail(err, CPA_INVALID, "--device: this build has no CUDA back end, expected auto or host");
#endif
    if (devices == 0) {
        return cpa_fail(err, CPA_INVALID,
                        "--device: found 0 CUDA devices for %d ranks on a host: no GPU, no driver, or none visible, or "
                        "the first is older than compute capability 8.0; install the driver of NVIDIA, look at "
                        "CUDA_VISIBLE_DEVICES, or use --device host",
                        ranks);
    }
    return cpa_fail(err, CPA_INVALID,
                    "--device: found %d CUDA devices for %d ranks on a host, expected one a rank; start fewer ranks, "
                    "or use --device host",
                    devices, ranks);
}

/* The CUDA device of this rank among those that the ranks of its host see; -1: there is not one for each. */
static cpa_status find_ordinal(cpa_control *control, const cpa_rank_placement *placement, int32_t found, int32_t *out,
                               cpa_error *err) {
    cpa_visible_devices mine = {.count = found}, *seen = calloc((size_t)control->size, sizeof *seen);
    if (found > 0) cpa_device_pci_address(CPA_BACKEND_CUDA, 0, mine.first);
    cpa_status status = seen ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for %d devices", control->size);
    status = cpa_control_agree(control, status, err);
    if (status == CPA_OK) status = cpa_control_find_host(control, err);
    if (status == CPA_OK) status = gather_here(control, &mine, sizeof mine, seen, err);
    if (status == CPA_OK) *out = cpa_devices_choose(seen, placement->ranks_here, placement->rank_here);
    free(seen);
    return status;
}

static cpa_status choose(cpa_control *control, cpa_device_choice choice, cpa_rank_placement *placement,
                         cpa_error *err) {
    /* The host with the fewest devices for its ranks speaks for all; auto without any CUDA device is the host. */
    int32_t found = cpa_device_count(CPA_BACKEND_CUDA), ordinal = -1;
    CPA_TRY(find_ordinal(control, placement, found, &ordinal, err));
    double most[] = {-found, found, placement->ranks_here, -ordinal};
    CPA_TRY(cpa_control_max(control, most, 4, err));
    const int32_t devices = (int32_t)-most[0], ranks = (int32_t)most[2];
    if (choice == CPA_DEVICE_AUTO && most[1] == 0) return CPA_OK;
    if (most[3] > 0) return too_few_devices(devices, ranks, err);
    placement->backend = CPA_BACKEND_CUDA;
    placement->ordinal = ordinal;
    placement->memory_bytes = cpa_device_free_memory(CPA_BACKEND_CUDA, placement->ordinal);
    return move_to_device(control, placement, err);
}

cpa_status cpa_placement_choose(cpa_comm *comm, cpa_device_choice choice, cpa_rank_placement *placement,
                                cpa_error *err) {
    cpa_control control;
    if (choice == CPA_DEVICE_HOST) return CPA_OK;
    CPA_TRY(cpa_control_open(comm, &control, err));
    cpa_status status = choose(&control, choice, placement, err);
    cpa_control_close(&control);
    return status;
}

cpa_device_options cpa_placement_device(const cpa_rank_placement *placement) {
    return (cpa_device_options){
        .size = sizeof(cpa_device_options),
        .backend = placement->backend,
        .ordinal = placement->ordinal,
        .threads = placement->threads,
        .cpus = placement->n_cpus ? placement->cpus : NULL,
        .n_cpus = placement->n_cpus,
    };
}
