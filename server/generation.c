#include "server/generation.h"

#include <stdlib.h>

void cpa_generation_release(cpa_generation *g) {
    for (int64_t i = 0; i < g->n_prompts; i++) free(g->prompts[i].ids);
    free(g->prompts);
    free(g->stop_ids);
    for (int i = 0; i < g->n_stops; i++) free(g->stops[i].text);
    free(g->salt);
    json_decref(g->tools);
    *g = (cpa_generation){.n = 0};
}
