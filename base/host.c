#include "base/host.h"

#include <stdio.h>
#include <string.h>

void cpa_host_boot(char out[CPA_BOOT_BYTES]) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    out[0] = 0;
    if (!file) return;
    if (!fgets(out, CPA_BOOT_BYTES, file)) out[0] = 0;
    out[strcspn(out, "\n")] = 0;
    fclose(file);
}
