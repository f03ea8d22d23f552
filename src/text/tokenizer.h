/* Text to token ids and back, as the tokenizer of a Hugging Face folder says: tokenizer.json of byte pair encoding
 * (byte-level, or of characters with bytes to fall back to), or a sentencepiece model, tokenizer.model. Ids are those
 * of the packages tokenizers and sentencepiece. Texts are UTF-8 and may hold any character, U+0000 too. */
#ifndef CPA_TEXT_TOKENIZER_H
#define CPA_TEXT_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#include "src/text/token_list.h"
#include "src/text/token_texts.h"

/* Does not change once it is open: any number of threads may use one at once. */
typedef struct cpa_tokenizer cpa_tokenizer;

/* Opens the tokenizer of a folder, of tokenizer.json if that is there. *out is NULL, with CPA_OK, if the folder has
 * neither file. CPA_UNSUPPORTED for a tokenizer of another kind; CPA_IO, CPA_INVALID; the line says what was found, in
 * which file and under which key, and what was expected. The caller closes *out. */
cpa_status cpa_tokenizer_open(const char *folder, cpa_tokenizer **out, cpa_error *err);
void cpa_tokenizer_close(cpa_tokenizer *tokenizer); /* which may be NULL */

/* One more than the greatest id. */
int64_t cpa_tokenizer_vocabulary(const cpa_tokenizer *tokenizer);

/* Adds the ids of a text to the list. Special tokens that the text spells out become their ids; with `add_special` the
 * ids come that the tokenizer puts around a text, such as that of its beginning. CPA_INVALID, with the offset of the
 * byte, if the text is not UTF-8; the list is then as it was. */
cpa_status cpa_tokenizer_encode(const cpa_tokenizer *tokenizer, const char *text, size_t bytes, int add_special,
                                cpa_token_list *out, cpa_error *err);

/* The text of n ids, in UTF-8 with U+FFFD in place of what is broken; ids that are none of the tokenizer's stand for
 * nothing, and those of special tokens neither with `skip_special`. The caller frees *text, which ends with a zero that
 * does not count in *bytes. */
cpa_status cpa_tokenizer_decode(const cpa_tokenizer *tokenizer, const uint32_t *ids, int64_t n, int skip_special,
                                char **text, size_t *bytes, cpa_error *err);

/* The bytes that one id adds to a text, which need not be whole characters; NULL for an id that is none of the
 * tokenizer's. They live as long as the tokenizer. */
const char *cpa_tokenizer_token(const cpa_tokenizer *tokenizer, uint32_t id, size_t *bytes);

/* Whether an id is that of a special token. */
int cpa_tokenizer_is_special(const cpa_tokenizer *tokenizer, uint32_t id);

/* What the ids stand for. */
const cpa_token_texts *cpa_tokenizer_texts(const cpa_tokenizer *tokenizer);

#endif
