/* How the strings of a vocabulary become text, as the decoders of the package tokenizers do. */
#ifndef CPA_TEXT_TOKEN_DECODER_H
#define CPA_TEXT_TOKEN_DECODER_H

#include "src/text/json_part.h"
#include "src/text/token_texts.h"

enum { CPA_DECODER_REPLACEMENTS = 4 };

typedef struct cpa_token_decoder {
    int is_byte_level;     /* characters stand for bytes */
    int has_byte_fallback; /* "<0x00>" and so on stand for bytes */
    int replacements;
    struct cpa_replacement {
        const char *from, *to; /* texts of the decoder's file */
    } replacement[CPA_DECODER_REPLACEMENTS];
    int has_fused, strips, first_has_no_space;
} cpa_token_decoder;

/* Reads the object under "decoder", which must outlive *out. CPA_UNSUPPORTED for decoders of other types. */
cpa_status cpa_token_decoder_read(const cpa_json *file, cpa_token_decoder *out, cpa_error *err);

/* Sets how texts are put together. */
void cpa_token_decoder_begin(const cpa_token_decoder *decoder, cpa_token_texts *texts);
/* Sets what an id stands for by its string; 0 without memory, else 1. */
int cpa_token_decoder_set(const cpa_token_decoder *decoder, uint32_t id, const char *token, size_t bytes,
                          cpa_token_texts *texts);

#endif
