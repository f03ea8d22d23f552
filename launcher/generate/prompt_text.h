/* The prompt of `cp_attn generate` as text: as it is, or as a message of a chat. */
#ifndef CPA_LAUNCHER_PROMPT_TEXT_H
#define CPA_LAUNCHER_PROMPT_TEXT_H

#include "launcher/generate/ids.h"
#include "launcher/settings/settings.h"
#include "src/text/tokenizer.h"

/* The ids of --prompt, by the tokenizer of the folder; with --chat those of a chat of a user's message, and of --system
 * before it, by the folder's chat template. All are below `vocabulary`, and there is one at least. Else CPA_INVALID, and
 * what opening a template gives. The caller frees *out, which is set only on success. */
cpa_status cpa_prompt_text_read(const cpa_settings *settings, const cpa_tokenizer *tokenizer, int64_t vocabulary,
                                cpa_ids *out, cpa_error *err);

#endif
