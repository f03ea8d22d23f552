#include "launcher/block_store.h"

#include <stdio.h>
#include <string.h>

#include <cpattn/engine.h>

#include "base/check.h"
#include "base/file.h"
#include "base/json_file.h"
#include "program/output_file.h"

/* What follows the name of a form, or NULL where the store is of another. */
static const char *after(const cpa_settings *settings, const char *form) {
    const size_t n = strlen(form);
    return strncmp(settings->block_store, form, n) == 0 ? settings->block_store + n : NULL;
}

static const char *nixl_folder(const cpa_settings *settings) {
    return after(settings, "nixl:");
}

static const char *mooncake_file(const cpa_settings *settings) {
    return after(settings, "mooncake:");
}

cpa_status cpa_job_store_check(const cpa_settings *settings, cpa_error *err) {
    const char *folder = nixl_folder(settings), *file = mooncake_file(settings), *why = NULL;
    if (file) {
        FILE *opened = cpa_file_open(file, &why);
        if (!opened) return cpa_fail(err, CPA_IO, "--block-store: %s: %s", file, why);
        fclose(opened);
    } else if (settings->block_store[0]) {
        return cpa_output_check_folder("--block-store", folder ? folder : settings->block_store, err);
    }
    return CPA_OK;
}

/* A job that exports nothing needs no memory for it. */
static cpa_status open_nixl(const cpa_settings *settings, cpa_nixl_store **out, cpa_error *err) {
    const int exports = settings->block_transfer & CPA_TRANSFER_EXPORT;
    const cpa_nixl_options options = {.size = sizeof options,
                                      .folder = nixl_folder(settings),
                                      .bytes = exports ? (int64_t)(settings->block_store_size * 0x1p30) : 0};
    return cpa_nixl_store_create(&options, out, err);
}

/* The keys are those of Mooncake's own configuration files. */
static cpa_status read_mooncake(const cpa_json *json, cpa_mooncake_options *out, cpa_error *err) {
    static const int64_t MOST = (int64_t)1 << 50;
    const cpa_json_presence required = CPA_JSON_REQUIRED, optional = CPA_JSON_OPTIONAL;
    CPA_TRY(cpa_json_text(json, "local_hostname", required, &out->local_hostname, err));
    CPA_TRY(cpa_json_text(json, "metadata_server", required, &out->metadata_server, err));
    CPA_TRY(cpa_json_text(json, "master_server_address", required, &out->master_server, err));
    CPA_TRY(cpa_json_text(json, "protocol", optional, &out->protocol, err));
    CPA_TRY(cpa_json_text(json, "device_name", optional, &out->device_name, err));
    CPA_TRY(cpa_json_int(json, "global_segment_size", optional, 0, MOST, &out->segment_bytes, err));
    return cpa_json_int(json, "local_buffer_size", optional, 0, MOST, &out->buffer_bytes, err);
}

static cpa_status open_mooncake(const cpa_settings *settings, cpa_mooncake_store **out, cpa_error *err) {
    cpa_mooncake_options options = {.size = sizeof options};
    json_t *object;
    const char *file = mooncake_file(settings);
    CPA_TRY(cpa_json_load(file, &object, err));
    const cpa_json json = {.path = file, .prefix = "", .object = object};
    cpa_status status = read_mooncake(&json, &options, err);
    if (status == CPA_OK) status = cpa_mooncake_store_create(&options, out, err);
    json_decref(object);
    return status;
}

static int has_library;

int cpa_job_store_has_library(void) {
    return has_library;
}

static cpa_status open_store(const cpa_settings *settings, cpa_job_store *out, cpa_error *err) {
    has_library = nixl_folder(settings) || mooncake_file(settings);
    if (nixl_folder(settings)) {
        CPA_TRY(open_nixl(settings, &out->nixl, err));
        cpa_nixl_store_table(out->nixl, &out->table);
    } else if (mooncake_file(settings)) {
        CPA_TRY(open_mooncake(settings, &out->mooncake, err));
        cpa_mooncake_store_table(out->mooncake, &out->table);
    } else {
        CPA_TRY(cpa_folder_store_create(settings->block_store, &out->folder, err));
        cpa_folder_store_table(out->folder, &out->table);
    }
    return CPA_OK;
}

cpa_status cpa_job_store_open(const cpa_settings *settings, int32_t rank, cpa_job_store *out, cpa_error *err) {
    if (!settings->block_store[0]) return CPA_OK;
    if (rank == 0) CPA_TRY(cpa_model_name(settings->model_dir, out->model, err));
    CPA_TRY(open_store(settings, out, err));
    out->table.model = out->model;
    out->is_open = 1;
    return CPA_OK;
}

void cpa_job_store_close(cpa_job_store *store) {
    cpa_folder_store_destroy(store->folder);
    cpa_nixl_store_destroy(store->nixl);
    cpa_mooncake_store_destroy(store->mooncake);
    memset(store, 0, sizeof *store);
}
