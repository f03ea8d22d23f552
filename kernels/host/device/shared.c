/* Memory that processes of this host share: a file without a name, which others open through the process that made it
 * and which is gone with the last of them. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "kernels/shared_memory.h"

static cpa_status map_file(int file, int64_t bytes, void **out, cpa_error *err) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return cpa_fail(err, CPA_NO_MEMORY, "shared memory: %" PRId64 " bytes cannot be mapped: %s", bytes,
                        strerror(errno));
    *out = memory;
    return CPA_OK;
}

static cpa_status share(cpa_device *device, cpa_memory_mark *mark, void **out, cpa_error *err) {
    struct stat about;
    (void)device;
    const int file = memfd_create("cpattn", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, mark->bytes) != 0 || fstat(file, &about) != 0) {
        const int why = errno;
        if (file >= 0) close(file);
        return cpa_fail(err, CPA_NO_MEMORY, "shared memory: no file of %" PRId64 " bytes: %s", mark->bytes,
                        strerror(why));
    }
    const cpa_status status = map_file(file, mark->bytes, out, err);
    if (status != CPA_OK) {
        close(file);
        return status;
    }
    mark->system.host.process = getpid();
    mark->system.host.descriptor = file;
    mark->system.host.file = about.st_ino;
    return CPA_OK;
}

static void unshare(cpa_device *device, const cpa_memory_mark *mark, void *memory) {
    (void)device;
    munmap(memory, (size_t)mark->bytes);
    close((int)mark->system.host.descriptor);
}

/* The numbers are another process's, and may be old: what they name is that memory only if file and length are. */
static cpa_status map(cpa_device *device, const cpa_memory_mark *mark, void **out, cpa_error *err) {
    char path[80];
    struct stat about;
    (void)device;
    snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%" PRId64, mark->system.host.process,
             mark->system.host.descriptor);
    const int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return cpa_fail(err, CPA_IO, "shared memory: %s cannot be opened: %s; expected the process that has it", path,
                        strerror(errno));
    cpa_status status = CPA_OK;
    if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode) || about.st_ino != mark->system.host.file ||
        about.st_size != mark->bytes)
        status = cpa_fail(err, CPA_IO, "shared memory: %s is another file; expected one of %" PRId64 " bytes", path,
                          mark->bytes);
    if (status == CPA_OK) status = map_file(file, mark->bytes, out, err);
    close(file);
    return status;
}

static void unmap(cpa_device *device, const cpa_memory_mark *mark, void *memory) {
    (void)device;
    munmap(memory, (size_t)mark->bytes);
}

const cpa_shared_memory_table cpa_host_memory_sharing = {share, unshare, map, unmap};
