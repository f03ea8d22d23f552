#include "program/output_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"

static cpa_status refuse(const char *option, const char *path, const char *reason, cpa_error *err) {
    return cpa_fail(err, CPA_INVALID, "%s: found '%s' (%s), expected a file that can be written", option, path, reason);
}

/* The file beside `path`, with the permissions that open gives; its name goes to `name`. */
static FILE *open_beside(const char *path, char *name, size_t bytes) {
    snprintf(name, bytes, "%s.XXXXXX", path);
    int descriptor = mkstemp(name);
    if (descriptor < 0) return NULL;
    mode_t mask = umask(0);
    umask(mask);
    fchmod(descriptor, 0666 & ~mask);
    FILE *file = fdopen(descriptor, "w");
    if (!file) {
        close(descriptor);
        unlink(name);
    }
    return file;
}

cpa_status cpa_output_check_folder(const char *option, const char *path, cpa_error *err) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode) && access(path, W_OK | X_OK) == 0) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected a folder that can be written to", option, path);
}

cpa_status cpa_output_check(const char *option, const char *path, cpa_error *err) {
    char name[PATH_MAX];
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) return refuse(option, path, "no regular file", err);
    FILE *file = open_beside(path, name, sizeof name);
    if (!file) return refuse(option, path, strerror(errno), err);
    fclose(file);
    unlink(name);
    return CPA_OK;
}

cpa_status cpa_output_retire(const char *path, cpa_error *err) {
    char older[PATH_MAX];
    if (access(path, F_OK) != 0) return CPA_OK;
    int length = snprintf(older, sizeof older, "%s.old", path);
    if (length < (int)sizeof older && rename(path, older) == 0) return CPA_OK;
    const char *reason = strerror(length < (int)sizeof older ? errno : ENAMETOOLONG);
    return cpa_fail(err, CPA_IO, "%s: the file of an earlier run could not be renamed (%s)", path, reason);
}

cpa_status cpa_output_flush(cpa_error *err) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return CPA_OK;
    if (errno == 0 && fputc('\n', stdout) != EOF) fflush(stdout); /* an earlier write failed: this one tells why */
    return cpa_fail(err, CPA_IO, "standard output could not be written (%s)",
                    errno ? strerror(errno) : "an earlier write failed");
}

cpa_status cpa_output_open(const char *path, cpa_output_file *out, cpa_error *err) {
    out->path = path;
    out->file = open_beside(path, out->name, sizeof out->name);
    return out->file ? CPA_OK : cpa_fail(err, CPA_IO, "%s: could not be opened (%s)", path, strerror(errno));
}

cpa_status cpa_output_close(cpa_output_file *output, int whole, cpa_error *err) {
    int closed = fclose(output->file) == 0;
    if (whole && closed && rename(output->name, output->path) == 0) return CPA_OK;
    int reason = errno;
    unlink(output->name);
    return cpa_fail(err, CPA_IO, "%s: could not be written (%s)", output->path, strerror(reason));
}
