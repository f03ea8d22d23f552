#include "src/schedule/block_events.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

void cpa_block_events_stored(const cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit) {
    if (!s->options.on_block_event) return;
    uint32_t *tokens = malloc((size_t)unit->n * sizeof *tokens);
    if (!tokens) {
        cpa_log(CPA_LOG_WARN, "request %llu: no memory to tell of a block that can be found",
                (unsigned long long)sequence->request.id);
        return;
    }
    for (int64_t i = 0; i < unit->n; i++) tokens[i] = cpa_sequence_token(sequence, &s->options, unit->first + i);
    cpa_block_event event = {.kind = CPA_BLOCK_STORED,
                             .group = unit->group,
                             .first_token = unit->first,
                             .tokens = tokens,
                             .n_tokens = unit->n};
    memcpy(event.digest, unit->key.bytes, sizeof event.digest);
    if (unit->first > 0) memcpy(event.parent, unit->parent.bytes, sizeof event.parent);
    s->options.on_block_event(s->options.block_event_ctx, &event);
    free(tokens);
}

void cpa_block_events_removed(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *digest) {
    cpa_block_event event = {.kind = CPA_BLOCK_REMOVED, .group = group};
    if (!s->options.on_block_event || !digest) return;
    memcpy(event.digest, digest->bytes, sizeof event.digest);
    s->options.on_block_event(s->options.block_event_ctx, &event);
}
