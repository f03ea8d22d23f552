#include "src/llm/folder_model.h"

#include "base/check.h"
#include "base/min_max.h"

static cpa_status load(const char *folder, const cpa_model_config *config, const cpa_transformer_options *options,
                       cpa_folder_model *model, cpa_error *err) {
    cpa_safetensors *files = NULL;
    CPA_TRY(cpa_safetensors_open(folder, &files, err));
    cpa_error why = {CPA_OK, ""};
    const cpa_status status = cpa_transformer_create(model->device, config, files, options, &model->transformer, &why);
    cpa_safetensors_close(files);
    if (status == CPA_OK) return CPA_OK;
    const int wrong = status == CPA_INVALID || status == CPA_UNSUPPORTED; /* tensors, which are named without a file */
    return wrong ? cpa_fail(err, status, "%s: %s", folder, why.message) : cpa_fail(err, status, "%s", why.message);
}

cpa_status cpa_folder_model_open(const char *folder, const cpa_model_config *config,
                                 const cpa_transformer_options *options, const cpa_device_options *engine_device,
                                 cpa_folder_model *out, cpa_error *err) {
    cpa_device_options device = *engine_device;
    device.threads = 1; /* nothing runs on it but copies */
    device.cpus = NULL;
    device.n_cpus = 0;
    *out = (cpa_folder_model){.device = NULL};
    CPA_TRY(cpa_device_open(&device, &out->device, err));
    const cpa_status status = load(folder, config, options, out, err);
    if (status != CPA_OK) cpa_folder_model_close(out);
    return status;
}

void cpa_folder_model_close(cpa_folder_model *model) {
    cpa_transformer_destroy(model->transformer);
    if (model->device) cpa_device_close(model->device);
    *model = (cpa_folder_model){.device = NULL};
}

int64_t cpa_folder_model_bytes(const cpa_model_config *config, const cpa_transformer_options *options) {
    cpa_transformer_options of_rank = *options;
    int64_t most = 0;
    for (of_rank.rank = 0; of_rank.rank < of_rank.ranks; of_rank.rank++)
        most = cpa_max64(most, cpa_transformer_bytes(config, &of_rank));
    return most;
}
