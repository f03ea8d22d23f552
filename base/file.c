#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

FILE *cpa_file_open(const char *path, const char **why) {
    struct stat info;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* regular files do not heed the last one */
    const int is_there = descriptor >= 0 && fstat(descriptor, &info) == 0;
    FILE *file = is_there && S_ISREG(info.st_mode) ? fdopen(descriptor, "rb") : NULL;
    if (file) return file;
    *why = is_there && !S_ISREG(info.st_mode) ? "found no regular file, expected one" : strerror(errno);
    const int reason = errno;
    if (descriptor >= 0) close(descriptor);
    errno = reason;
    return NULL;
}

cpa_status cpa_file_failure(cpa_status otherwise) {
    return errno == ENOMEM ? CPA_NO_MEMORY : otherwise;
}
