/* The messages of a chat, as OpenAI's interface has them. */
#ifndef CPA_SERVER_CHAT_MESSAGES_H
#define CPA_SERVER_CHAT_MESSAGES_H

#include "server/fields.h"

/* Checks "messages": from 1 to 4096 objects with a role; their content is a text or parts of text, and may be missing
 * where an assistant calls tools or thinks. What else they have is the template's matter. 0, with the refusal filled, for
 * others. */
int cpa_chat_messages_check(const cpa_fields *fields);

/* Checks "tools": an array of functions with a name. */
int cpa_chat_tools_check(const cpa_fields *fields);

#endif
