#include "src/cache/disk_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/check.h"

void cpa_disk_files_init(cpa_disk_files *files) {
    files->folder = -1;
    for (int32_t g = 0; g < CPA_MAX_LAYER_GROUPS; g++) files->groups[g] = -1;
}

/* A file which, if this one `locks`, no other process may have open; -1: see *err. */
static int open_file(int folder, const char *folder_name, const char *name, int locks, cpa_error *err) {
    const int fd = openat(folder, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        cpa_fail(err, CPA_IO, "swap_folder %s: %s cannot be opened: %s", folder_name, name, strerror(errno));
        return -1;
    }
    if (!locks || flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    cpa_fail(err, CPA_IO, "swap_folder %s: another process has %s open", folder_name, name);
    close(fd);
    return -1;
}

cpa_status cpa_disk_files_open(cpa_disk_files *files, const char *folder, int32_t rank, int32_t n_groups,
                               cpa_error *err) {
    char name[64];
    files->folder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (files->folder < 0) return cpa_fail(err, CPA_IO, "swap_folder %s cannot be opened: %s", folder, strerror(errno));
    for (int32_t g = 0; g < n_groups; g++) {
        snprintf(name, sizeof name, "rank-%" PRId32 "-group-%" PRId32 ".blocks", rank, g);
        files->groups[g] = open_file(files->folder, folder, name, g == 0, err);
        if (files->groups[g] < 0) return CPA_IO;
    }
    return CPA_OK;
}

int cpa_disk_files_sync(const cpa_disk_files *files) {
    for (int32_t g = 0; g < CPA_MAX_LAYER_GROUPS; g++)
        if (files->groups[g] >= 0 && fdatasync(files->groups[g]) != 0) return 0;
    return 1;
}

void cpa_disk_files_close(cpa_disk_files *files) {
    for (int32_t g = 0; g < CPA_MAX_LAYER_GROUPS; g++)
        if (files->groups[g] >= 0) close(files->groups[g]);
    if (files->folder >= 0) close(files->folder);
    cpa_disk_files_init(files);
}
