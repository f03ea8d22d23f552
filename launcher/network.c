#include "launcher/network.h"

#include "base/check.h"

static cpa_status create(const char *folder, const cpa_model_config *config, const cpa_transformer_options *options,
                         cpa_network *network, cpa_error *err) {
    cpa_safetensors *files = NULL;
    CPA_TRY(cpa_safetensors_open(folder, &files, err));
    cpa_status status = cpa_transformer_create(network->device, config, files, options, &network->transformer, err);
    cpa_safetensors_close(files);
    if (status == CPA_OK) network->model = cpa_transformer_model(network->transformer);
    return status;
}

cpa_status cpa_network_open(const char *folder, const cpa_model_config *config, const cpa_transformer_options *options,
                            const cpa_device_options *engine_device, cpa_network *out, cpa_error *err) {
    cpa_network network = {.device = NULL};
    cpa_device_options device = *engine_device;
    device.threads = 1; /* nothing runs on it but copies */
    device.cpus = NULL;
    device.n_cpus = 0;
    CPA_TRY(cpa_device_open(&device, &network.device, err));
    cpa_status status = create(folder, config, options, &network, err);
    if (status != CPA_OK) {
        cpa_network_close(&network);
        return status;
    }
    *out = network;
    return CPA_OK;
}

void cpa_network_close(cpa_network *network) {
    cpa_transformer_destroy(network->transformer);
    if (network->device) cpa_device_close(network->device);
    *network = (cpa_network){.device = NULL};
}
