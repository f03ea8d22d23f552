/* The ids that a tokenizer puts around a text. */
#ifndef CPA_TEXT_TOKEN_FRAME_H
#define CPA_TEXT_TOKEN_FRAME_H

#include "src/text/json_part.h"
#include "src/text/token_list.h"

/* One of zeros puts nothing around. */
typedef struct cpa_token_frame {
    cpa_token_list before, after;
} cpa_token_frame;

/* Reads the object under "post_processor". CPA_UNSUPPORTED for other types than TemplateProcessing, ByteLevel and a
 * Sequence of them. */
cpa_status cpa_token_frame_read(const cpa_json *file, cpa_token_frame *out, cpa_error *err);
void cpa_token_frame_release(cpa_token_frame *frame);

#endif
