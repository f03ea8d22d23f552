/* Which cores of a host each of its ranks takes. Pure but for cpa_cores_near, which reads /sys. */
#ifndef CPA_PROGRAM_CORES_H
#define CPA_PROGRAM_CORES_H

#include <hwloc.h>
#include <stdint.h>

/* The CPUs of the topology that are nearest to the PCI device at an address such as "0000:3b:00.0", those of its NUMA
 * node. Empty where that is not known, as in many containers, or where none of them is in the topology. */
void cpa_cores_near(hwloc_topology_t topology, const char *pci_address, hwloc_bitmap_t out);

/* The cores of rank `me` of the n ranks of a host, of which rank r works with a device near the CPUs near[r]; empty
 * sets are near nothing. Ranks with the same CPUs divide their cores evenly, in contiguous shares. All cores are
 * divided evenly among all ranks instead where some rank is near nothing, where the sets of two ranks overlap without
 * being the same, and where a set has fewer cores than ranks. Sets *near_device to whether the cores are those near the
 * device, and returns how many there are; 0 if there are fewer cores than ranks. `cores` receives them, first to
 * last. */
int32_t cpa_cores_share(hwloc_topology_t topology, const hwloc_bitmap_t *near, int32_t n, int32_t me,
                        hwloc_bitmap_t cores, int *near_device);

#endif
