#include "base/cgroup.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CGROUP_ROOT "/sys/fs/cgroup"

/* Opens a file of the cgroup (version 2) of this process. */
static FILE *open_cgroup_file(const char *name) {
    char line[1024] = "", path[2048];
    FILE *self = fopen("/proc/self/cgroup", "r");
    if (!self) return NULL;
    while (fgets(line, sizeof line, self) && strncmp(line, "0::", 3) != 0) line[0] = 0;
    fclose(self);
    line[strcspn(line, "\n")] = 0;
    if (!line[0]) return NULL;
    snprintf(path, sizeof path, CGROUP_ROOT "%s/%s", line + 3, name);
    FILE *file = fopen(path, "r");
    /* Inside a container the path may be the host's; the container's own group is then at the root. */
    snprintf(path, sizeof path, CGROUP_ROOT "/%s", name);
    return file ? file : fopen(path, "r");
}

/* A number in a file of the cgroup; -1 if there is none ("max"). */
static int64_t cgroup_number(const char *name) {
    long long number = -1;
    FILE *file = open_cgroup_file(name);
    if (!file) return -1;
    if (fscanf(file, "%lld", &number) != 1) number = -1;
    fclose(file);
    return number;
}

int32_t cpa_cgroup_cores(void) {
    long long quota = 0, period = 0;
    FILE *file = open_cgroup_file("cpu.max");
    if (!file) return 0;
    int read = fscanf(file, "%lld %lld", &quota, &period);
    fclose(file);
    return read == 2 && quota > 0 && period > 0 ? (int32_t)((quota + period - 1) / period) : 0;
}

int64_t cpa_cgroup_memory(void) {
    long long kib = -1;
    char line[256];
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && kib < 0 && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %lld kB", &kib) != 1) kib = -1;
    }
    if (file) fclose(file);
    int64_t bytes = kib >= 0 ? kib * 1024 : (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
    int64_t limit = cgroup_number("memory.max"), used = cgroup_number("memory.current");
    if (limit >= 0 && used >= 0) {
        int64_t left = limit > used ? limit - used : 0;
        if (left < bytes) bytes = left;
    }
    return bytes;
}
