#include "base/host.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

void cpa_host_boot(char out[CPA_BOOT_BYTES]) {
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    out[0] = 0;
    if (!file) return;
    if (!fgets(out, CPA_BOOT_BYTES, file)) out[0] = 0;
    out[strcspn(out, "\n")] = 0;
    fclose(file);
}

uint64_t cpa_host_network(void) {
    char text[CPA_BOOT_BYTES + 64];
    cpa_host_boot(text);
    const size_t used = strlen(text);
    const ssize_t more = readlink("/proc/self/ns/net", text + used, sizeof text - used);
    if (used == 0 || more <= 0) return 0;
    return cpa_hash_bytes(CPA_HASH_START, text, used + (size_t)more);
}
