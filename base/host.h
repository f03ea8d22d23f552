/* By what processes find out that they are on one host. */
#ifndef CPA_HOST_H
#define CPA_HOST_H

#include <stdint.h>

enum { CPA_BOOT_BYTES = 40 };

/* The number that the kernel has given itself when it was booted, as text: the same for all processes that it runs, and
 * for no others. Empty if it is not known. */
void cpa_host_boot(char out[CPA_BOOT_BYTES]);

/* A number that processes have in common which reach each other by loopback: those of one boot and one network
 * namespace. 0 if it is not known. */
uint64_t cpa_host_network(void);

#endif
