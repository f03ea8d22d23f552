#include "server/generation.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cpa_generation_set_tenant(cpa_generation *g, int64_t key) {
    enum { NAME_BYTES = 32 };
    const char *own = g->salt ? g->salt : "";
    const size_t bytes = NAME_BYTES + strlen(own);
    char *salt = malloc(bytes);
    g->tenant = malloc(NAME_BYTES);
    if (!salt || !g->tenant) {
        free(salt);
        return 0;
    }
    snprintf(g->tenant, NAME_BYTES, "key %" PRId64, key);
    snprintf(salt, bytes, "%s:%s", g->tenant, own);
    free(g->salt);
    g->salt = salt;
    return 1;
}

void cpa_generation_release(cpa_generation *g) {
    for (int64_t i = 0; i < g->n_prompts; i++) free(g->prompts[i].ids);
    free(g->prompts);
    free(g->stop_ids);
    free(g->logit_biases);
    for (int64_t i = 0; i < g->n_prompt_texts; i++) cpa_prompt_text_close(&g->prompt_texts[i]);
    free(g->prompt_texts);
    for (int i = 0; i < g->n_stops; i++) free(g->stops[i].text);
    free(g->salt);
    free(g->tenant);
    free(g->binding);
    cpa_constraint_close(g->constraint);
    json_decref(g->tools);
    *g = (cpa_generation){.n = 0};
}
