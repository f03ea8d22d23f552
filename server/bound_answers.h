/* Answers that are bound to a schema, an expression or a choice: the fields that say so, and what becomes of them. */
#ifndef CPA_SERVER_BOUND_ANSWERS_H
#define CPA_SERVER_BOUND_ANSWERS_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* Notes what the answers of a generation are bound to: `constraint` is one of constraint_text.h, and `field` the one that
 * is to blame where it is refused. */
int cpa_bind_answers(const cpa_server *server, const cpa_fields *fields, const char *field, const json_t *constraint,
                     cpa_generation *generation);

/* Binds the answers to what is noted, which takes up to half a second; 0, with the refusal filled, where that fails. */
int cpa_bind_generation(const cpa_server *server, cpa_generation *generation, cpa_refusal *refusal);

/* Notes what is asked for by response_format, guided_json, guided_regex, guided_choice, and structured_outputs, of
 * which there may be one. The sampling has been read. */
int cpa_bound_answers_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *generation);

#endif
