/* Whether a chat may, must or must not call tools, and how its answers are read. */
#ifndef CPA_SERVER_TOOL_CHOICE_H
#define CPA_SERVER_TOOL_CHOICE_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* tool_choice and parallel_tool_calls, behind everything else: the tools and messages are checked, `thinks_already` is
 * known, and what the answer is bound to otherwise. Says how the reply is read, and binds the answer where it must call a
 * tool; behind thoughts alone, where the prompt begins them. */
int cpa_tool_choice_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *generation);

#endif
