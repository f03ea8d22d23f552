/* Layers whose cache is not quantised: --kv-cache-dtype-skip-layers. */
#ifndef CPA_SETTINGS_SKIP_LAYERS_H
#define CPA_SETTINGS_SKIP_LAYERS_H

#include "launcher/settings/model_file.h"

/* Marks the layers of a model that a list names, commas between its items: the number of a layer, from 0 on; one below
 * 0, which counts from the last layer, -1, backwards; or sliding_window, all layers with a window. Nothing is marked by
 * an empty list. CPA_INVALID, with a line that `where` begins, for another item, for a layer that the model does not
 * have, and over a cache that is not quantised, or of latents. */
cpa_status cpa_skip_layers(const char *where, const char *list, cpa_model_file *model, cpa_error *err);

#endif
