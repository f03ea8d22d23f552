/* The tokens of a vocabulary by their bytes: a tree in which tokens that begin alike share the way. */
#ifndef CPA_GRAMMAR_TOKEN_TRIE_H
#define CPA_GRAMMAR_TOKEN_TRIE_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#include "src/grammar/plain_text.h"

/* A token as a grammar sees it. */
typedef struct cpa_grammar_token {
    const char *text; /* NULL: there is no such token, or it may not be in a constrained answer */
    size_t bytes;
    int is_special; /* written by its name alone, below, and not by its text */
} cpa_grammar_token;

/* What stands for a special token in a grammar: a byte that no UTF-8 has, and the id. */
enum { CPA_SPECIAL_NAME_BYTES = 5, CPA_SPECIAL_LEAD = 0xff };
void cpa_special_name(uint32_t id, char name[CPA_SPECIAL_NAME_BYTES]);

typedef struct cpa_trie_node {
    uint32_t end;   /* the node behind the last one whose bytes begin with this node's */
    uint32_t first; /* tokens[first] to tokens[first + count] end here */
    uint16_t count, depth;
    uint16_t
        plain; /* most characters that a token has from this byte on, if all have plain ones alone (plain_text.h) */
    uint8_t byte;
} cpa_trie_node;

/* Does not change once it is made. */
typedef struct cpa_token_trie {
    int64_t vocabulary;
    cpa_trie_node *nodes; /* [n_nodes], each before the nodes below it; there is no root */
    int64_t n_nodes;
    uint32_t *tokens; /* ids in the order of their bytes */
    int64_t n_tokens;
    int64_t most_bytes; /* bytes of the longest token */
    uint8_t bytes[256]; /* whether some token is this byte alone */
    char **names;       /* [vocabulary] bytes of each token, as cpa_token_trie_bytes gives them; NULL: none */
    uint32_t *lengths;
    uint8_t *is_special;
} cpa_token_trie;

/* Of tokens[vocabulary], whose texts are copied. Those of no bytes, or of more than 60,000, are none. CPA_NO_MEMORY. */
cpa_status cpa_token_trie_make(const cpa_grammar_token *tokens, int64_t vocabulary, cpa_token_trie *out,
                               cpa_error *err);
void cpa_token_trie_release(cpa_token_trie *trie);

/* The bytes of a token in a grammar; NULL if there is none. */
const char *cpa_token_trie_bytes(const cpa_token_trie *trie, uint32_t token, size_t *bytes);

/* The special token of a text; -1 if there is none. `texts` are those of which the trie was made. */
int64_t cpa_token_trie_special(const cpa_token_trie *trie, const char *text, size_t bytes);

#endif
