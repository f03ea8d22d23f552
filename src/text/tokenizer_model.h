/* tokenizer.model, of the library sentencepiece, with what tokenizer_config.json beside it says of special tokens. */
#ifndef CPA_TEXT_TOKENIZER_MODEL_H
#define CPA_TEXT_TOKENIZER_MODEL_H

#include <cpattn/status.h>

#include "src/text/token_list.h"
#include "src/text/token_texts.h"

/* Does not change once it is open. */
typedef struct cpa_tokenizer_model cpa_tokenizer_model;

/* Opens the files of a folder whose path is not too long, of which tokenizer_config.json may be missing, and sets
 * what the ids stand for, *texts, which the caller releases on failure too. */
cpa_status cpa_tokenizer_model_open(const char *folder, cpa_tokenizer_model **out, cpa_token_texts *texts,
                                    cpa_error *err);
void cpa_tokenizer_model_close(cpa_tokenizer_model *tokenizer); /* which may be NULL */

/* As cpa_tokenizer_encode, of a valid text; on failure ids may have been added. */
cpa_status cpa_tokenizer_model_encode(const cpa_tokenizer_model *tokenizer, const char *text, size_t bytes,
                                      int add_special, cpa_token_list *out, cpa_error *err);

#endif
