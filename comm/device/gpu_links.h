/* What joins the GPUs of two ranks of one host. */
#ifndef CPA_COMM_GPU_LINKS_H
#define CPA_COMM_GPU_LINKS_H

#include <cpattn/device.h>
#include <cpattn/engine.h>

/* The PCI address of the current device; empty where that is not known. */
void cpa_gpu_address(char out[CPA_PCI_ADDRESS_BYTES]);

/* The links of the GPU `mine` to each of n others of this host, by their PCI addresses; what is empty, or not to be seen
 * from here, is CPA_LINK_UNKNOWN. Where another GPU is among them it asks NVML, which is loaded at run time, and where there is none CUDA, which knows whether
 * memory can be reached, but not over what. */
void cpa_gpu_links(const char *mine, const char (*others)[CPA_PCI_ADDRESS_BYTES], int32_t n, cpa_link *links);

#endif
