#include "src/schedule/scheduler_found.h"

#include "base/array.h"
#include "base/min_max.h"
#include "src/schedule/evicted_units.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/unconfirmed.h"

/* ---- one unit ---- */

/* What can be looked up in a placement: the full units of the known tokens, then the end of a prompt that nothing
 * follows yet. What is found has no logits: a prompt that is to tell its log-probabilities is computed. */
static int64_t count_links(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement) {
    int64_t unit = cpa_prefix_unit(&s->options, placement), known = cpa_sequence_known(sequence);
    if (!cpa_scheduler_shares(s, sequence)) return 0;
    if (sequence->request.sampling.prompt_logprobs && sequence->emitted == 0) return 0;
    return known / unit + (sequence->emitted == 0 && known % unit != 0);
}

int64_t cpa_found_end(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement, int64_t j) {
    return cpa_min64((j + 1) * cpa_prefix_unit(&s->options, placement), cpa_sequence_known(sequence));
}

const cpa_prefix_digest *cpa_found_digest(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement,
                                          int64_t j) {
    const int64_t block_size = s->options.block_size, end = cpa_found_end(s, sequence, placement, j),
                  last = (end - 1) / block_size;
    if (!cpa_array_reserve(&sequence->probe, &sequence->probe_capacity, last + 1, sizeof *sequence->probe)) return NULL;
    for (int64_t i; (i = sequence->n_probe) <= last; sequence->n_probe++) {
        const cpa_prefix_digest *parent = i > 0 ? &sequence->probe[i - 1] : &sequence->root;
        const int32_t n = (int32_t)cpa_min64(block_size, cpa_sequence_known(sequence) - i * block_size);
        if (!cpa_scheduler_digest(s, sequence, parent, i * block_size, n, &sequence->probe[i])) return NULL;
    }
    return &sequence->probe[last];
}

int cpa_found_key(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t j,
                  cpa_prefix_digest *key) {
    const cpa_prefix_digest *digest = cpa_found_digest(s, sequence, placement, j);
    if (digest) *key = cpa_sequence_key(placement, digest);
    return digest != NULL;
}

const int32_t *cpa_found_blocks(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int32_t group,
                                int64_t j) {
    cpa_prefix_digest key;
    if (!cpa_found_key(s, sequence, placement, j, &key) || cpa_unconfirmed_has(s, group, &key)) return NULL;
    return cpa_prefix_cache_find(s->caches[group], &key);
}

/* Whether unit j can be found in a group, or (evicted) could once it is fetched. */
static int is_there(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int32_t group, int64_t j,
                    int evicted) {
    cpa_prefix_digest key;
    if (cpa_found_blocks(s, sequence, placement, group, j)) return 1;
    return evicted && cpa_found_key(s, sequence, placement, j, &key) &&
           cpa_evicted_where(s, group, &key) != CPA_EVICTED_NOWHERE;
}

/* ---- how many ---- */

/* How many of its units were found in a placement when it last looked there, in the first group. */
static int64_t *found_in(cpa_sequence *sequence, cpa_placement placement) {
    return placement.kind == CPA_ON_RANK ? &sequence->shards[placement.rank].found : &sequence->found_sharded;
}

int64_t cpa_found_position(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement,
                           int64_t units) {
    return cpa_min64(units * cpa_prefix_unit(&s->options, placement), cpa_sequence_known(sequence) - 1);
}

/* The first unit that the window of a group reaches behind so many. What is precise has none: what it has behind its first
 * tokens nobody attends. */
static int64_t first_in_window(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement,
                               int32_t group, int64_t units) {
    const int64_t unit = cpa_prefix_unit(&s->options, placement), window = s->options.groups.list[group].window;
    const int64_t open = cpa_found_position(s, sequence, placement, units) / unit * unit, oldest = open - window + 1;
    if (s->options.groups.list[group].is_precise) return units;
    return window == 0 || oldest < 0 ? 0 : oldest / unit;
}

/* The units that have sinks of a group. */
static int64_t units_of_sinks(const cpa_scheduler *s, cpa_placement placement, int32_t group) {
    const int64_t unit = cpa_prefix_unit(&s->options, placement);
    return (s->options.groups.list[group].sinks + unit - 1) / unit;
}

int cpa_found_needs(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement, int32_t group,
                    int64_t units, int64_t j) {
    return group == 0 || j < units_of_sinks(s, placement, group) ||
           j >= first_in_window(s, sequence, placement, group, units);
}

/* The last of so many units that a group needs and that are not there; -1: none. */
static int64_t last_missing(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int32_t group,
                            int64_t units, int evicted) {
    const int64_t first = first_in_window(s, sequence, placement, group, units);
    int64_t j = units - 1;
    for (; j >= first; j--)
        if (!is_there(s, sequence, placement, group, j, evicted)) return j;
    for (j = cpa_min64(first, units_of_sinks(s, placement, group)) - 1; j >= 0; j--)
        if (!is_there(s, sequence, placement, group, j, evicted)) return j;
    return -1;
}

/* The most units, of so many that the first group has, behind which all groups can go on. */
static int64_t units_of_all(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t units,
                            int evicted) {
    for (int32_t g = 1; g < s->options.groups.count && units > 0;) {
        const int64_t missing = last_missing(s, sequence, placement, g, units, evicted);
        g = missing < 0 ? g + 1 : 1;
        units = missing < 0 ? units : missing;
    }
    return units;
}

int64_t cpa_found_units(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    int64_t *found = found_in(sequence, placement);
    const int64_t links = count_links(s, sequence, placement);
    while (*found < links && cpa_found_blocks(s, sequence, placement, 0, *found)) ++*found;
    return units_of_all(s, sequence, placement, *found, 0);
}

int64_t cpa_found_with_evicted(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    const int64_t found = cpa_found_units(s, sequence, placement), links = count_links(s, sequence, placement);
    int64_t units = *found_in(sequence, placement);
    if (!s->evicted) return found;
    while (units < links && is_there(s, sequence, placement, 0, units, 1)) units++;
    return cpa_max64(found, units_of_all(s, sequence, placement, units, 1));
}

int64_t cpa_found_units_again(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    *found_in(sequence, placement) = 0;
    return cpa_found_units(s, sequence, placement);
}

/* ---- what others compute ---- */

/* The key of the first unit that cannot be found in a placement; 0: all can. */
static int next_key(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, cpa_prefix_digest *key) {
    const int64_t found = *found_in(sequence, placement);
    return found < count_links(s, sequence, placement) && cpa_found_key(s, sequence, placement, found, key);
}

int64_t cpa_found_expect(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    const int64_t found = cpa_found_with_evicted(s, sequence, placement);
    cpa_prefix_digest key;
    const cpa_sequence *computing = next_key(s, sequence, placement, &key) ? cpa_scheduler_who_computes(s, &key) : NULL;
    if (!computing) return found;
    int64_t known = cpa_min64(cpa_sequence_known(sequence), cpa_sequence_known(computing));
    return cpa_max64(found, known / cpa_prefix_unit(&s->options, placement));
}

int cpa_found_later(cpa_scheduler *s, cpa_sequence *sequence) {
    cpa_prefix_digest key;
    if (!next_key(s, sequence, sequence->placement, &key)) return 0;
    if (cpa_scheduler_who_computes(s, &key)) return 1;
    const int awaits = cpa_unconfirmed_has(s, 0, &key);
    s->awaits_confirmation |= awaits;
    return awaits;
}
