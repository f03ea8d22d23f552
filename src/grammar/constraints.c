#include "src/grammar/constraints.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/grammar/constraint_text.h"

enum {
    MOST_IDLE = 32, /* grammars that are kept without an answer */
    LEAST_ROOM = 1 << 21,
    MOST_ROOM = 1 << 26 /* for the states of a grammar */
};

typedef struct compiled {
    struct compiled *next;
    char *text;
    size_t bytes;
    pthread_mutex_t lock; /* guards the recogniser */
    cpa_recogniser *recogniser;
    int64_t answers; /* answers bound by this grammar; guarded, like the list and its order, by cpa_constraints.lock */
    uint64_t last_use;
} compiled;

struct cpa_constraints {
    cpa_token_trie tokens;
    uint32_t *end_ids;
    int64_t n_end_ids;
    pthread_mutex_t lock;
    compiled *first;
    uint64_t uses;
    int64_t grammars, bytes, most_bytes; /* grammars in the list, their bytes, and the most bytes that they may have */
    int64_t answers;                     /* answers bound by all grammars */
    int is_closed;
};

struct cpa_constraint {
    cpa_constraints *constraints;
    compiled *compiled;
    cpa_recognition *answer;
    int has_ended;
};

static cpa_status no_memory(cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "no memory for a constraint");
}

cpa_status cpa_constraints_open(const cpa_grammar_token *tokens, int64_t vocabulary, const uint32_t *end_ids,
                                int64_t n_end_ids, int64_t most_bytes, cpa_constraints **out, cpa_error *err) {
    cpa_constraints *c = calloc(1, sizeof *c);
    uint32_t *ids = malloc(((size_t)n_end_ids + 1) * sizeof *ids);
    const cpa_status status = c && ids ? cpa_token_trie_make(tokens, vocabulary, &c->tokens, err) : no_memory(err);
    if (status != CPA_OK) {
        free(c);
        free(ids);
        return status;
    }
    for (int64_t i = 0; i < n_end_ids; i++) {
        if (end_ids[i] < (uint64_t)vocabulary) ids[c->n_end_ids++] = end_ids[i];
    }
    c->end_ids = ids;
    c->most_bytes = most_bytes;
    pthread_mutex_init(&c->lock, NULL);
    *out = c;
    return CPA_OK;
}

static void destroy(compiled *grammar) {
    cpa_recogniser_close(grammar->recogniser);
    pthread_mutex_destroy(&grammar->lock);
    free(grammar->text);
    free(grammar);
}

static void destroy_all(cpa_constraints *constraints) {
    for (compiled *next, *c = constraints->first; c; c = next) {
        next = c->next;
        destroy(c);
    }
    cpa_token_trie_release(&constraints->tokens);
    pthread_mutex_destroy(&constraints->lock);
    free(constraints->end_ids);
    free(constraints);
}

void cpa_constraints_close(cpa_constraints *constraints) {
    if (!constraints) return;
    pthread_mutex_lock(&constraints->lock);
    constraints->is_closed = 1;
    const int is_last = constraints->answers == 0;
    pthread_mutex_unlock(&constraints->lock);
    if (is_last) destroy_all(constraints);
}

/* Of grammars without an answer the ones that were used of late stay, `most` at most; 0 if there are no more. */
static int tidy(cpa_constraints *constraints, int64_t most) {
    int64_t idle = 0;
    compiled **oldest = NULL;
    for (compiled **c = &constraints->first; *c; c = &(*c)->next) {
        if ((*c)->answers > 0) continue;
        idle++;
        if (!oldest || (*c)->last_use < (*oldest)->last_use) oldest = c;
    }
    if (idle <= most) return 0;
    compiled *old = *oldest;
    *oldest = old->next;
    constraints->grammars--;
    constraints->bytes -= cpa_recogniser_bytes(old->recogniser);
    destroy(old);
    return 1;
}

static cpa_status compile(cpa_constraints *constraints, const char *text, size_t bytes, compiled **out,
                          cpa_error *err) {
    cpa_recogniser *recogniser = NULL;
    CPA_TRY(cpa_constraint_compile(text, bytes, &constraints->tokens, &recogniser, err));
    compiled *c = calloc(1, sizeof *c);
    char *copy = malloc(bytes + 1);
    if (!c || !copy) {
        free(c);
        free(copy);
        cpa_recogniser_close(recogniser);
        return no_memory(err);
    }
    memcpy(copy, text, bytes);
    c->text = copy;
    c->bytes = bytes;
    c->recogniser = recogniser;
    pthread_mutex_init(&c->lock, NULL);
    *out = c;
    return CPA_OK;
}

/* Adds a grammar to the list; 0 if there is no room. */
static int add(cpa_constraints *constraints, compiled *fresh) {
    const int64_t bytes = cpa_recogniser_bytes(fresh->recogniser), room = constraints->most_bytes - bytes;
    while (constraints->bytes > room && tidy(constraints, 0)) {}
    if (constraints->bytes > room) return 0;
    fresh->next = constraints->first;
    constraints->first = fresh;
    constraints->grammars++;
    constraints->bytes += bytes;
    return 1;
}

/* The grammar of a text, with one answer more: `fresh`, unless there is one already, or no room. NULL: none. */
static compiled *find(cpa_constraints *constraints, const char *text, size_t bytes, compiled *fresh) {
    pthread_mutex_lock(&constraints->lock);
    compiled *c = constraints->first;
    while (c && (c->bytes != bytes || memcmp(c->text, text, bytes) != 0)) c = c->next;
    if (!c && fresh && add(constraints, fresh)) c = fresh;
    if (c) {
        c->answers++;
        constraints->answers++;
        c->last_use = ++constraints->uses;
    }
    pthread_mutex_unlock(&constraints->lock);
    return c;
}

/* The same; a new grammar is made outside of the lock, so that nobody waits for it. */
static cpa_status take(cpa_constraints *constraints, const char *text, size_t bytes, compiled **out, cpa_error *err) {
    *out = find(constraints, text, bytes, NULL);
    if (*out) return CPA_OK;
    compiled *fresh = NULL;
    CPA_TRY(compile(constraints, text, bytes, &fresh, err));
    *out = find(constraints, text, bytes, fresh);
    if (*out != fresh) destroy(fresh);
    return *out ? CPA_OK : cpa_fail(err, CPA_BUSY, "the grammars of other answers leave no room for this one");
}

static void give_back(cpa_constraints *constraints, compiled *c) {
    pthread_mutex_lock(&constraints->lock);
    c->answers--;
    tidy(constraints, MOST_IDLE);
    const int is_last = --constraints->answers == 0 && constraints->is_closed;
    pthread_mutex_unlock(&constraints->lock);
    if (is_last) destroy_all(constraints);
}

/* An answer of a grammar that was taken for it. */
static cpa_status begin(cpa_constraints *constraints, compiled *c, cpa_constraint **out, cpa_error *err) {
    const uint32_t *mask;
    pthread_mutex_lock(&constraints->lock);
    const int64_t share = constraints->most_bytes / (constraints->grammars + 1);
    pthread_mutex_unlock(&constraints->lock);
    const int64_t room = share < LEAST_ROOM ? LEAST_ROOM : share > MOST_ROOM ? MOST_ROOM : share;
    cpa_constraint *constraint = calloc(1, sizeof *constraint);
    cpa_status status = constraint ? CPA_OK : no_memory(err);
    if (status == CPA_OK) {
        pthread_mutex_lock(&c->lock);
        cpa_recogniser_set_room(c->recogniser, room);
        status = cpa_recognition_begin(c->recogniser, &constraint->answer, err);
        /* The first mask, of which the grammar's later answers have no work any more. */
        if (status == CPA_OK) status = cpa_recognition_mask(constraint->answer, &mask, err);
        if (status != CPA_OK) cpa_recognition_end(constraint->answer);
        pthread_mutex_unlock(&c->lock);
    }
    if (status != CPA_OK) {
        free(constraint);
        give_back(constraints, c);
        return status;
    }
    constraint->constraints = constraints;
    constraint->compiled = c;
    *out = constraint;
    return CPA_OK;
}

cpa_status cpa_constraint_open(cpa_constraints *constraints, const char *text, size_t bytes, cpa_constraint **out,
                               cpa_error *err) {
    compiled *c;
    CPA_TRY(take(constraints, text, bytes, &c, err));
    return begin(constraints, c, out, err);
}

cpa_status cpa_constraint_again(const cpa_constraint *constraint, cpa_constraint **out, cpa_error *err) {
    cpa_constraints *constraints = constraint->constraints;
    pthread_mutex_lock(&constraints->lock);
    constraint->compiled->answers++;
    constraints->answers++;
    pthread_mutex_unlock(&constraints->lock);
    return begin(constraints, constraint->compiled, out, err);
}

void cpa_constraint_close(cpa_constraint *constraint) {
    if (!constraint) return;
    pthread_mutex_lock(&constraint->compiled->lock);
    cpa_recognition_end(constraint->answer);
    pthread_mutex_unlock(&constraint->compiled->lock);
    give_back(constraint->constraints, constraint->compiled);
    free(constraint);
}

static int is_end(const cpa_constraints *constraints, uint32_t token) {
    for (int64_t i = 0; i < constraints->n_end_ids; i++) {
        if (constraints->end_ids[i] == token) return 1;
    }
    return 0;
}

int cpa_constraint_is_whole(const cpa_constraint *constraint) {
    pthread_mutex_lock(&constraint->compiled->lock);
    const int is_whole = constraint->has_ended || cpa_recognition_is_whole(constraint->answer);
    pthread_mutex_unlock(&constraint->compiled->lock);
    return is_whole;
}

cpa_status cpa_constraint_accept(cpa_constraint *constraint, uint32_t token, cpa_error *err) {
    int taken = 0;
    if (is_end(constraint->constraints, token) && cpa_constraint_is_whole(constraint)) {
        constraint->has_ended = 1;
        return CPA_OK;
    }
    if (!constraint->has_ended) {
        pthread_mutex_lock(&constraint->compiled->lock);
        const cpa_status status = cpa_recognition_add_token(constraint->answer, token, &taken, err);
        pthread_mutex_unlock(&constraint->compiled->lock);
        if (status != CPA_OK) return status;
    }
    return taken ? CPA_OK : cpa_fail(err, CPA_INVALID, "token %u may not come here in this answer", token);
}

cpa_status cpa_constraint_mask(cpa_constraint *constraint, uint32_t *words, cpa_error *err) {
    const cpa_constraints *c = constraint->constraints;
    const size_t bytes = (size_t)(c->tokens.vocabulary + 31) / 32 * sizeof *words;
    const uint32_t *mask = NULL;
    cpa_status status = CPA_OK;
    int is_whole = 1;
    pthread_mutex_lock(&constraint->compiled->lock);
    if (!constraint->has_ended) {
        status = cpa_recognition_mask(constraint->answer, &mask, err);
        is_whole = cpa_recognition_is_whole(constraint->answer);
    }
    if (mask) memcpy(words, mask, bytes);
    pthread_mutex_unlock(&constraint->compiled->lock);
    if (status != CPA_OK) return status;
    if (!mask) memset(words, 0, bytes);
    for (int64_t i = 0; is_whole && i < c->n_end_ids; i++) words[c->end_ids[i] / 32] |= 1u << c->end_ids[i] % 32;
    return CPA_OK;
}

uint64_t cpa_constraint_key(const cpa_constraint *constraint) {
    pthread_mutex_lock(&constraint->compiled->lock);
    const uint64_t key = cpa_recognition_key(constraint->answer) * 2 + (uint64_t)constraint->has_ended;
    pthread_mutex_unlock(&constraint->compiled->lock);
    return key;
}

/* ---- For an engine ---- */

static cpa_status accept_token(void *ctx, uint32_t token, cpa_error *err) {
    return cpa_constraint_accept(ctx, token, err);
}

static cpa_status make_mask(void *ctx, uint32_t *words, cpa_error *err) {
    return cpa_constraint_mask(ctx, words, err);
}

static uint64_t key_of(void *ctx) {
    return cpa_constraint_key(ctx);
}

static void close_answer(void *ctx) {
    cpa_constraint_close(ctx);
}

const cpa_constraint_ops cpa_constraint_engine_ops = {.size = sizeof(cpa_constraint_ops),
                                                      .accept = accept_token,
                                                      .mask = make_mask,
                                                      .key = key_of,
                                                      .close = close_answer};
