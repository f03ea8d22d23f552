/* Which CUDA device each rank of a host takes. Pure. */
#ifndef CPA_PROGRAM_DEVICES_H
#define CPA_PROGRAM_DEVICES_H

#include <cpattn/device.h>

/* The CUDA devices that a rank sees. */
typedef struct cpa_visible_devices {
    int32_t count;
    char first[CPA_PCI_ADDRESS_BYTES]; /* PCI address of device 0; empty: no device, or not known */
} cpa_visible_devices;

/* The number of the device of rank `me` of the n ranks of a host, of which rank r sees seen[r]: its own number where
 * every rank sees one for each; 0 where every rank sees a single one, each another, as under Slurm's --gpus-per-task=1.
 * -1 where there is not one for each rank. */
int32_t cpa_devices_choose(const cpa_visible_devices *seen, int32_t n, int32_t me);

#endif
