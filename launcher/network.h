/* The model of --model-dir on one rank: its weights and what its steps need, on the device that the engine will open. */
#ifndef CPA_LAUNCHER_NETWORK_H
#define CPA_LAUNCHER_NETWORK_H

#include "src/model/transformer.h"

/* One that was never opened has only zeros. */
typedef struct cpa_network {
    cpa_device *device; /* a handle of its own; the memory is that of the engine's */
    cpa_transformer *transformer;
    cpa_model model;
} cpa_network;

/* Loads the weights of a folder to the device that `engine_device` opens. Every rank for itself. *out is set only on
 * success; it must outlive the engine. */
cpa_status cpa_network_open(const char *folder, const cpa_model_config *config, const cpa_transformer_options *options,
                            const cpa_device_options *engine_device, cpa_network *out, cpa_error *err);
void cpa_network_close(cpa_network *network);

#endif
