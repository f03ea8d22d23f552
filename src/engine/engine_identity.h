/* What the cache of an engine depends on, as a text and as hashes: blocks of another identity are of no use. */
#ifndef CPA_ENGINE_IDENTITY_H
#define CPA_ENGINE_IDENTITY_H

#include <cpattn/engine.h>

enum { CPA_IDENTITY_BYTES = 256, CPA_FOLDER_IDENTITY_BYTES = 1024 };

/* What keys and values depend on besides tokens. Where a sequence begins follows from it, and so the order of sums: layers
 * that draft are left out, as results are to have the bits that they have without, and so is what leaves keys out where
 * nothing does. */
void cpa_engine_describe_cache(const cpa_engine_options *options, uint64_t scales, char out[CPA_IDENTITY_BYTES]);
/* What the blocks of a rank in swap_folder depend on: a text that is the same if they can be used again. `scales`: the
 * hash of scales of heads (head_scales.h). */
cpa_status cpa_engine_describe_folder(const cpa_engine_options *options, uint64_t scales, int32_t rank, int32_t cp_size,
                                      char out[CPA_FOLDER_IDENTITY_BYTES], cpa_error *err);

/* A hash of the rules of all layers, arrays included. */
uint64_t cpa_engine_hash_rules(const cpa_model_shape *model);
/* A hash of which layers are left unquantised. */
uint64_t cpa_engine_hash_unquantised(const cpa_model_shape *model);
/* A hash of what each layer is to see, and of how it scores that, and of how many layers draft: rows in a store have those
 * too. */
uint64_t cpa_engine_hash_store_layers(const cpa_model_shape *model);

#endif
