#include "program/cores.h"

#include <hwloc/linux.h>
#include <stdio.h>

void cpa_cores_near(hwloc_topology_t topology, const char *pci_address, hwloc_bitmap_t out) {
    char path[128];
    hwloc_bitmap_zero(out);
    if (!pci_address[0]) return;
    /* As in hwloc/cudart.h: needs none of the plugins that discover devices. */
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%.32s/local_cpus", pci_address);
    if (hwloc_linux_read_path_as_cpumask(path, out) != 0) hwloc_bitmap_zero(out);
    hwloc_bitmap_and(out, out, hwloc_topology_get_topology_cpuset(topology));
}

/* Whether the sets tell where every rank belongs. */
static int are_usable(hwloc_topology_t topology, const hwloc_bitmap_t *near, int32_t n) {
    for (int32_t a = 0; a < n; a++) {
        int32_t ranks = 0, cores = hwloc_get_nbobjs_inside_cpuset_by_type(topology, near[a], HWLOC_OBJ_CORE);
        for (int32_t b = 0; b < n; b++) {
            int same = hwloc_bitmap_isequal(near[a], near[b]);
            if (!same && hwloc_bitmap_intersects(near[a], near[b])) return 0;
            ranks += same;
        }
        if (cores < ranks) return 0;
    }
    return n > 0;
}

/* Adds the share of the k-th of n ranks in the cores inside a set; how many. */
static int32_t take_share(hwloc_topology_t topology, hwloc_const_bitmap_t inside, int32_t k, int32_t n,
                          hwloc_bitmap_t cores) {
    int32_t each = hwloc_get_nbobjs_inside_cpuset_by_type(topology, inside, HWLOC_OBJ_CORE) / n;
    for (int32_t i = 0; i < each; i++) {
        hwloc_obj_t core =
            hwloc_get_obj_inside_cpuset_by_type(topology, inside, HWLOC_OBJ_CORE, (unsigned)(k * each + i));
        hwloc_bitmap_or(cores, cores, core->cpuset);
    }
    return each;
}

int32_t cpa_cores_share(hwloc_topology_t topology, const hwloc_bitmap_t *near, int32_t n, int32_t me,
                        hwloc_bitmap_t cores, int *near_device) {
    hwloc_bitmap_zero(cores);
    *near_device = are_usable(topology, near, n);
    if (!*near_device) return take_share(topology, hwloc_topology_get_topology_cpuset(topology), me, n, cores);
    int32_t before = 0, ranks = 0;
    for (int32_t r = 0; r < n; r++) {
        if (!hwloc_bitmap_isequal(near[r], near[me])) continue;
        before += r < me;
        ranks++;
    }
    return take_share(topology, near[me], before, ranks, cores);
}
