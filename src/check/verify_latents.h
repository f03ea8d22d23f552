/* What a row over latents would be under mistakes in how these are read, for the diagnosis of a wrong row: rotated
 * elements whose halves are swapped, values that begin where the rotated elements are wide further on, and a tile whose
 * scale is that of the one before it. */
#ifndef CPA_VERIFY_LATENTS_H
#define CPA_VERIFY_LATENTS_H

#include "src/check/verify_keys.h"

/* Tiles of a row that may have the scale of the one before. */
enum { CPA_VERIFY_MOST_TILES = 4, CPA_VERIFY_LATENT_MISTAKES = 2 + CPA_VERIFY_MOST_TILES - 1 };

typedef struct cpa_verify_latents {
    int32_t count; /* mistakes that are tried; 0: the cache has no latents */
    cpa_reference_row rows[CPA_VERIFY_LATENT_MISTAKES];
} cpa_verify_latents;

/* Begins rows like `row`, which has no key yet. */
void cpa_verify_latents_begin(cpa_verify_latents *latents, const cpa_verify *verify, const cpa_reference_row *row);
/* Adds a key that the row sees, token `index` of a piece, which lies in keys->k_raw. `expansion` as in verify_keys.h. */
void cpa_verify_latents_add(cpa_verify_latents *latents, const cpa_verify *verify, const cpa_form *form,
                            const float *expansion, const cpa_verify_piece *piece, int64_t index, int64_t position,
                            cpa_verify_keys *keys);
/* Says in `out` what a mistake is. */
void cpa_verify_latents_name(int32_t mistake, char *out, size_t bytes);

#endif
