/* What happens to a text before it is cut into words: Unicode's normal forms, and characters that stand for others.
 * As the normalizers of the package tokenizers do. */
#ifndef CPA_TEXT_NORMALIZER_H
#define CPA_TEXT_NORMALIZER_H

#include "src/text/bytes.h"
#include "src/text/json_part.h"

enum { CPA_NORMALIZER_STEPS = 8 };

/* One of zeros changes nothing. Does not change once it is read. */
typedef struct cpa_normalizer {
    int count;
    struct cpa_normalizer_step *steps[CPA_NORMALIZER_STEPS];
} cpa_normalizer;

/* Reads the object under "normalizer". CPA_UNSUPPORTED for steps of other types. */
cpa_status cpa_normalizer_read(const cpa_json *file, cpa_normalizer *out, cpa_error *err);
void cpa_normalizer_release(cpa_normalizer *normalizer);

/* Whether it may replace characters by fewer. */
int cpa_normalizer_shortens(const cpa_normalizer *normalizer);

/* Puts the normal form of a valid text into *out, in place of what was there. */
cpa_status cpa_normalizer_apply(const cpa_normalizer *normalizer, const char *text, size_t bytes, cpa_bytes *out,
                                cpa_error *err);

#endif
