#include "launcher/block_store.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"

/* So much of the beginning and of the end of a file of weights tells it from others. */
enum { PROBE_BYTES = 1 << 16 };

static int tells_the_model(const struct dirent *file) {
    const char *end = strrchr(file->d_name, '.');
    return strcmp(file->d_name, "config.json") == 0 || (end && strcmp(end, ".safetensors") == 0);
}

static cpa_status add_file(const char *folder, const char *name, uint64_t *hash, cpa_error *err) {
    char path[2 * CPA_TEXT_BYTES];
    static char bytes[PROBE_BYTES];
    const char *why = "it cannot be read";
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, CPA_IO, "%s: %s", path, why);
    int ok = 1;
    *hash = cpa_hash_bytes(*hash, name, strlen(name) + 1);
    *hash = cpa_hash_bytes(*hash, bytes, fread(bytes, 1, sizeof bytes, file));
    ok = fseeko(file, 0, SEEK_END) == 0;
    const int64_t size = ok ? (int64_t)ftello(file) : 0;
    *hash = cpa_hash_bytes(*hash, &size, sizeof size);
    if (ok && size > PROBE_BYTES) {
        ok = fseeko(file, -(off_t)PROBE_BYTES, SEEK_END) == 0;
        *hash = cpa_hash_bytes(*hash, bytes, fread(bytes, 1, sizeof bytes, file));
    }
    ok = ok && !ferror(file);
    fclose(file);
    return ok ? CPA_OK : cpa_fail(err, CPA_IO, "%s: it cannot be read", path);
}

/* What tells the model of a folder from others of the same shape, wherever the folder is. */
static cpa_status name_model(const char *folder, char *out, size_t bytes, cpa_error *err) {
    struct dirent **files;
    uint64_t hash = CPA_HASH_START;
    const int n = scandir(folder, &files, tells_the_model, alphasort);
    cpa_status status = n < 0 ? cpa_fail(err, CPA_IO, "%s: it cannot be read", folder) : CPA_OK;
    for (int i = 0; i < n; i++) {
        if (status == CPA_OK) status = add_file(folder, files[i]->d_name, &hash, err);
        free(files[i]);
    }
    if (n >= 0) free(files);
    snprintf(out, bytes, "%016" PRIx64, hash);
    return status;
}

cpa_status cpa_job_store_open(const cpa_settings *settings, cpa_job_store *out, cpa_error *err) {
    if (!settings->block_store[0]) return CPA_OK;
    if (settings->model_dir[0]) CPA_TRY(name_model(settings->model_dir, out->model, sizeof out->model, err));
    CPA_TRY(cpa_folder_store_create(settings->block_store, &out->folder, err));
    cpa_folder_store_table(out->folder, &out->table);
    out->table.model = out->model;
    return CPA_OK;
}

void cpa_job_store_close(cpa_job_store *store) {
    cpa_folder_store_destroy(store->folder);
    memset(store, 0, sizeof *store);
}
