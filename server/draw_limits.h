/* The fields that limit which tokens an answer is drawn from: logit_bias and min_tokens. */
#ifndef CPA_SERVER_DRAW_LIMITS_H
#define CPA_SERVER_DRAW_LIMITS_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* Reads them; the biases are the generation's. */
int cpa_draw_limits_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *g);

/* 400 if an answer of so many tokens has no room for its min_tokens. */
int cpa_draw_limits_check(const cpa_fields *fields, const cpa_generation *g, int64_t tokens);

#endif
