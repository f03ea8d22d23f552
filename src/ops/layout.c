/* The lengths of structs of the interface that lie in others or in arrays: fixed, since callers are compiled with them.
 */
#include <cpattn/cpattn.h>

_Static_assert(sizeof(cpa_owner_map) == 8, "cpa_owner_map");
_Static_assert(sizeof(cpa_placement) == 8, "cpa_placement");
_Static_assert(sizeof(cpa_token_set) == 8, "cpa_token_set");
_Static_assert(sizeof(cpa_attention_shape) == 64, "cpa_attention_shape");
_Static_assert(sizeof(cpa_kv_view) == 192, "cpa_kv_view");
_Static_assert(sizeof(cpa_index_cache) == 256, "cpa_index_cache");
_Static_assert(sizeof(cpa_mask) == 64, "cpa_mask");
_Static_assert(sizeof(cpa_rope) == 64, "cpa_rope");
_Static_assert(sizeof(cpa_norm_rows) == 64, "cpa_norm_rows");
_Static_assert(sizeof(cpa_compress_state) == 64, "cpa_compress_state");
_Static_assert(sizeof(cpa_token_ranks) == 168, "cpa_token_ranks");
_Static_assert(sizeof(cpa_score_rules) == 56, "cpa_score_rules");
_Static_assert(sizeof(cpa_score_bias) == 88, "cpa_score_bias");
_Static_assert(sizeof(cpa_key_bits) == 72, "cpa_key_bits");
_Static_assert(sizeof(cpa_key_indices) == 80, "cpa_key_indices");
_Static_assert(sizeof(cpa_key_blocks) == 72, "cpa_key_blocks");
_Static_assert(sizeof(cpa_key_selection) == 64, "cpa_key_selection");
_Static_assert(sizeof(cpa_sparse_scope) == 264, "cpa_sparse_scope");
_Static_assert(sizeof(cpa_xattn_shape) == 64, "cpa_xattn_shape");
_Static_assert(sizeof(cpa_xattn_chunks) == 112, "cpa_xattn_chunks");
_Static_assert(sizeof(cpa_partial) == 64, "cpa_partial");
_Static_assert(sizeof(cpa_kv_range) == 64, "cpa_kv_range");
_Static_assert(sizeof(cpa_kv_span) == 64, "cpa_kv_span");
_Static_assert(sizeof(cpa_attend_item) == 96, "cpa_attend_item");
_Static_assert(sizeof(cpa_context_chunk) == 64, "cpa_context_chunk");
_Static_assert(sizeof(cpa_kv_ring_stats) == 64, "cpa_kv_ring_stats");
_Static_assert(sizeof(cpa_index_form) == 64, "cpa_index_form");
_Static_assert(sizeof(cpa_link) == 32, "cpa_link");
_Static_assert(sizeof(cpa_allocator) == 24, "cpa_allocator");
_Static_assert(sizeof(cpa_model_shape) == 192, "cpa_model_shape");
_Static_assert(sizeof(cpa_device_options) == 128, "cpa_device_options");
