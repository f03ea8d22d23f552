#include "src/model/model_name.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "src/model/safetensors.h"

/* So many bytes of a tensor are looked at in each of these places, evenly from its beginning to its end. Weights that were
 * trained differ in nearly all of their elements; of a file of any size this reads little. */
enum { SAMPLE_BYTES = 1 << 11, SAMPLES = 5, PATH_BYTES = 4096 };

static uint64_t hash_tensor(uint64_t hash, const cpa_tensor *tensor) {
    const char *data = tensor->data;
    const int64_t n = cpa_min64(SAMPLE_BYTES, tensor->bytes), last = tensor->bytes - n;
    hash = cpa_hash_bytes(hash, tensor->name, strlen(tensor->name) + 1);
    hash = cpa_hash_bytes(hash, tensor->type, strlen(tensor->type) + 1);
    hash = cpa_hash_bytes(hash, tensor->shape, (size_t)tensor->dims * sizeof *tensor->shape);
    for (int64_t i = 0; i < SAMPLES; i++) hash = cpa_hash_bytes(hash, data + last * i / (SAMPLES - 1), (size_t)n);
    return hash;
}

static cpa_status hash_weights(const char *folder, uint64_t *hash, cpa_error *err) {
    cpa_safetensors *files;
    CPA_TRY(cpa_safetensors_open(folder, &files, err));
    for (int64_t i = 0; i < cpa_safetensors_count(files); i++) *hash = hash_tensor(*hash, cpa_safetensors_at(files, i));
    cpa_safetensors_close(files);
    return CPA_OK;
}

static cpa_status hash_config(const char *folder, uint64_t *hash, cpa_error *err) {
    char path[PATH_BYTES], bytes[4096];
    const char *why = "it cannot be read";
    size_t n;
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, CPA_IO, "%s: %s", path, why);
    while ((n = fread(bytes, 1, sizeof bytes, file)) > 0) *hash = cpa_hash_bytes(*hash, bytes, n);
    const int failed = ferror(file);
    fclose(file);
    return failed ? cpa_fail(err, CPA_IO, "%s: it cannot be read", path) : CPA_OK;
}

cpa_status cpa_model_name(const char *folder, char out[CPA_MODEL_NAME_BYTES], cpa_error *err) {
    uint64_t hash = CPA_HASH_START;
    out[0] = 0;
    if (!folder[0]) return CPA_OK;
    CPA_TRY(hash_config(folder, &hash, err));
    CPA_TRY(hash_weights(folder, &hash, err));
    snprintf(out, CPA_MODEL_NAME_BYTES, "%016" PRIx64, hash);
    return CPA_OK;
}
