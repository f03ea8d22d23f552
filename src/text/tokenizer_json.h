/* tokenizer.json, as the package tokenizers writes it, of byte pair encoding. */
#ifndef CPA_TEXT_TOKENIZER_JSON_H
#define CPA_TEXT_TOKENIZER_JSON_H

#include <cpattn/status.h>

#include "src/text/token_list.h"
#include "src/text/token_texts.h"

/* Does not change once it is open. */
typedef struct cpa_tokenizer_json cpa_tokenizer_json;

/* Opens a file, and sets what its ids stand for, *texts, which the caller releases on failure too. CPA_UNSUPPORTED for
 * what is not here. "truncation" and "padding" are passed over: they are of whoever trained with the file. */
cpa_status cpa_tokenizer_json_open(const char *path, cpa_tokenizer_json **out, cpa_token_texts *texts, cpa_error *err);
void cpa_tokenizer_json_close(cpa_tokenizer_json *tokenizer); /* which may be NULL */

/* As cpa_tokenizer_encode, of a valid text; on failure ids may have been added. */
cpa_status cpa_tokenizer_json_encode(const cpa_tokenizer_json *tokenizer, const char *text, size_t bytes,
                                     int add_special, cpa_token_list *out, cpa_error *err);

#endif
