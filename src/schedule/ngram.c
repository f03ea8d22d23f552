#include <cpattn/ngram.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/struct_size.h"

enum { DEFAULT_MIN = 2, DEFAULT_MAX = 4, FIRST_SLOTS = 64, MOST_LOOKS = 64 };

/* Where n-grams of one length last ended: a hash table with open addressing, at most half full. The tokens themselves
 * are the keys. */
typedef struct ngram_table {
    uint32_t *slots; /* [n_slots], a power of two: index of the last token + 1; 0: empty */
    int64_t n_slots, used;
    uint32_t
        *before; /* [count] of the n-gram that ends at a token, where it ended before that, as in slots; branches */
    int64_t cap_before;
} ngram_table;

struct cpa_ngram {
    int32_t min, max, branches;
    uint32_t *tokens; /* [count] */
    int64_t count, capacity;
    int64_t indexed; /* n-grams that end before this token are in the tables: all but the ones that end the history */
    ngram_table tables[CPA_NGRAM_MAX + 1]; /* by length */
};

cpa_status cpa_ngram_create(const cpa_ngram_options *given, cpa_ngram **out, cpa_error *err) {
    cpa_ngram_options o = {.size = sizeof o};
    if (!out) return cpa_fail(err, CPA_INVALID, "ngram: out is NULL");
    if (given) CPA_TRY(CPA_STRUCT_TAKE("ngram", given, cpa_ngram_options, size, &o, err));
    if (o.min_tokens == 0) o.min_tokens = DEFAULT_MIN;
    if (o.max_tokens == 0) o.max_tokens = o.min_tokens > DEFAULT_MAX ? o.min_tokens : DEFAULT_MAX;
    if (o.min_tokens < 1 || o.max_tokens < o.min_tokens || o.max_tokens > CPA_NGRAM_MAX)
        return cpa_fail(err, CPA_INVALID, "ngram: %" PRId32 " to %" PRId32 " tokens, expected 1 to %d, in this order",
                        o.min_tokens, o.max_tokens, CPA_NGRAM_MAX);
    if (o.branches < 0 || o.branches > CPA_NGRAM_BRANCHES)
        return cpa_fail(err, CPA_INVALID, "ngram: %" PRId32 " branches, expected 0 to %d", o.branches,
                        CPA_NGRAM_BRANCHES);
    cpa_ngram *ngram = calloc(1, sizeof *ngram);
    if (!ngram) return cpa_fail(err, CPA_NO_MEMORY, "ngram: no memory");
    ngram->min = o.min_tokens;
    ngram->max = o.max_tokens;
    ngram->branches = o.branches > 1 ? o.branches : 1;
    *out = ngram;
    return CPA_OK;
}

void cpa_ngram_destroy(cpa_ngram *ngram) {
    if (!ngram) return;
    for (int32_t length = ngram->min; length <= ngram->max; length++) {
        free(ngram->tables[length].slots);
        free(ngram->tables[length].before);
    }
    free(ngram->tokens);
    free(ngram);
}

int64_t cpa_ngram_count(const cpa_ngram *ngram) {
    return ngram ? ngram->count : 0;
}

/* The slot of the n-gram that ends at token `last`: the one that has it, or the empty one where it belongs. */
static uint32_t *find_slot(const cpa_ngram *ngram, uint32_t *slots, int64_t n_slots, int32_t length, int64_t last) {
    const uint32_t *key = ngram->tokens + last + 1 - length;
    const size_t bytes = (size_t)length * sizeof *key;
    const uint64_t mask = (uint64_t)n_slots - 1;
    uint64_t hash = (uint64_t)length;
    for (int32_t i = 0; i < length; i++) hash = cpa_mix64(hash + key[i] * CPA_GOLDEN);
    for (uint64_t at = hash & mask;; at = (at + 1) & mask)
        if (slots[at] == 0 || memcmp(ngram->tokens + slots[at] - length, key, bytes) == 0) return &slots[at];
}

/* Room for n n-grams in a history of `count` tokens; 0 without memory. */
static int reserve(const cpa_ngram *ngram, ngram_table *table, int32_t length, int64_t n, int64_t count) {
    if (ngram->branches > 1 && !cpa_array_reserve(&table->before, &table->cap_before, count, sizeof *table->before))
        return 0;
    int64_t n_slots = table->n_slots ? table->n_slots : FIRST_SLOTS;
    while (n_slots < 2 * n) n_slots *= 2;
    if (n_slots == table->n_slots) return 1;
    uint32_t *slots = calloc((size_t)n_slots, sizeof *slots);
    if (!slots) return 0;
    for (int64_t i = 0; i < table->n_slots; i++)
        if (table->slots[i]) *find_slot(ngram, slots, n_slots, length, table->slots[i] - 1) = table->slots[i];
    free(table->slots);
    table->slots = slots;
    table->n_slots = n_slots;
    return 1;
}

/* The n-grams that end at a token, which from now on ended there last. */
static void index_token(cpa_ngram *ngram, int64_t last) {
    for (int32_t length = ngram->min; length <= ngram->max && length <= last + 1; length++) {
        ngram_table *table = &ngram->tables[length];
        uint32_t *slot = find_slot(ngram, table->slots, table->n_slots, length, last);
        table->used += *slot == 0;
        if (table->before) table->before[last] = *slot;
        *slot = (uint32_t)(last + 1);
    }
}

cpa_status cpa_ngram_add(cpa_ngram *ngram, const uint32_t *tokens, int64_t n, cpa_error *err) {
    if (!ngram || n < 0 || (n > 0 && !tokens))
        return cpa_fail(err, CPA_INVALID, "ngram: n is %" PRId64 ", tokens are %s, the history is %s", n,
                        tokens ? "set" : "NULL", ngram ? "set" : "NULL");
    int room = n <= UINT32_MAX - 1 - ngram->count &&
               cpa_array_reserve(&ngram->tokens, &ngram->capacity, ngram->count + n, sizeof *ngram->tokens);
    for (int32_t length = ngram->min; room && length <= ngram->max; length++)
        room = reserve(ngram, &ngram->tables[length], length, ngram->tables[length].used + n, ngram->count + n);
    if (!room) return cpa_fail(err, CPA_NO_MEMORY, "ngram: no memory for %" PRId64 " tokens", ngram->count + n);
    if (n > 0) memcpy(ngram->tokens + ngram->count, tokens, (size_t)n * sizeof *tokens);
    ngram->count += n;
    for (; ngram->indexed < ngram->count - 1; ngram->indexed++) index_token(ngram, ngram->indexed);
    return CPA_OK;
}

/* The `most` tokens from token `next` on. */
static void go_on(const cpa_ngram *ngram, int64_t next, int64_t most, uint32_t *drafts) {
    for (int64_t i = 0; i < most; i++)
        drafts[i] = next + i < ngram->count ? ngram->tokens[next + i] : drafts[next + i - ngram->count];
}

/* The token behind the last place of the n-gram of that length that the history ends with; 0: it has no other. */
static int64_t find_next(const cpa_ngram *ngram, int32_t length) {
    const ngram_table *table = &ngram->tables[length];
    return ngram->count > length ? *find_slot(ngram, table->slots, table->n_slots, length, ngram->count - 1) : 0;
}

int64_t cpa_ngram_draft(const cpa_ngram *ngram, int64_t most, uint32_t *drafts) {
    if (!ngram || !drafts) return 0;
    for (int32_t length = ngram->max; length >= ngram->min && most > 0; length--) {
        const int64_t next = find_next(ngram, length);
        if (next == 0) continue;
        go_on(ngram, next, most, drafts);
        return most;
    }
    return 0;
}

/* Whether a branch begins with that token. */
static int has_branch(const uint32_t *drafts, int64_t n, int64_t each, uint32_t token) {
    for (int64_t first = 0; first < n; first += each)
        if (drafts[first] == token) return 1;
    return 0;
}

int64_t cpa_ngram_draft_tree(const cpa_ngram *ngram, int64_t most, uint32_t *drafts, int32_t *parents) {
    if (!ngram || !drafts || !parents) return 0;
    const int64_t each = most > ngram->branches ? most / ngram->branches : 1;
    int64_t n = 0, looks = 0;
    for (int32_t length = ngram->max; length >= ngram->min; length--) {
        int64_t next = find_next(ngram, length);
        while (next > 0 && looks++ < MOST_LOOKS && n + each <= most && n < each * ngram->branches) {
            if (!has_branch(drafts, n, each, ngram->tokens[next])) {
                go_on(ngram, next, each, drafts + n);
                for (int64_t i = 0; i < each; i++) parents[n + i] = i == 0 ? -1 : (int32_t)(n + i - 1);
                n += each;
            }
            next = ngram->tables[length].before ? ngram->tables[length].before[next - 1] : 0;
        }
    }
    return n;
}
