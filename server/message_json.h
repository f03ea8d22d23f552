/* Messages of chats as JSON: whole ones, and what a stream adds to one. */
#ifndef CPA_SERVER_MESSAGE_JSON_H
#define CPA_SERVER_MESSAGE_JSON_H

#include <jansson.h>

#include "server/answer.h"

/* The message of a choice, or its delta where the answer is streamed: role, content, reasoning_content, tool_calls. NULL
 * without memory. */
json_t *cpa_message_json(const cpa_answer *answer, int64_t choice);

#endif
