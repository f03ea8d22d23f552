#include "src/grammar/token_trie.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"

enum { MOST_TOKEN_BYTES = 60000 };

void cpa_special_name(uint32_t id, char name[CPA_SPECIAL_NAME_BYTES]) {
    name[0] = (char)CPA_SPECIAL_LEAD;
    for (int i = 1; i < CPA_SPECIAL_NAME_BYTES; i++) name[i] = (char)(id >> (8 * (i - 1)) & 0xff);
}

static const char *bytes_of(const cpa_token_trie *trie, uint32_t token, char name[CPA_SPECIAL_NAME_BYTES], size_t *n) {
    *n = trie->is_special[token] ? CPA_SPECIAL_NAME_BYTES : trie->lengths[token];
    if (!trie->is_special[token]) return trie->names[token];
    cpa_special_name(token, name);
    return name;
}

static int compare_tokens(const void *a, const void *b, void *context) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    char names[2][CPA_SPECIAL_NAME_BYTES];
    size_t n, m;
    const char *p = bytes_of(context, x, names[0], &n), *q = bytes_of(context, y, names[1], &m);
    const int order = memcmp(p, q, n < m ? n : m);
    if (order != 0) return order;
    if (n != m) return n < m ? -1 : 1;
    return (x > y) - (x < y);
}

/* The nodes of the tokens, which are in order: of each, those that the one before has not. */
static int make_nodes(cpa_token_trie *trie) {
    int64_t capacity = 0;
    uint32_t *path = malloc(((size_t)trie->most_bytes + 1) * sizeof *path); /* nodes of the last token */
    uint16_t *plain = malloc(((size_t)trie->most_bytes + 1) * sizeof *plain);
    size_t n_path = 0;
    for (int64_t i = 0; path && plain && i < trie->n_tokens; i++) {
        char name[CPA_SPECIAL_NAME_BYTES];
        size_t n, shared = 0;
        const char *text = bytes_of(trie, trie->tokens[i], name, &n);
        while (shared < n && shared < n_path && trie->nodes[path[shared]].byte == (uint8_t)text[shared]) shared++;
        for (size_t d = shared; d < n_path; d++) trie->nodes[path[d]].end = (uint32_t)trie->n_nodes;
        if (!cpa_array_reserve(&trie->nodes, &capacity, trie->n_nodes + (int64_t)n, sizeof *trie->nodes)) break;
        for (size_t d = shared; d < n; d++) {
            path[d] = (uint32_t)trie->n_nodes;
            trie->nodes[trie->n_nodes++] =
                (cpa_trie_node){.first = (uint32_t)i, .depth = (uint16_t)d, .byte = (uint8_t)text[d]};
        }
        n_path = n;
        cpa_count_plain(text, n, plain);
        for (size_t d = 0; d < n; d++) {
            if (plain[d] > trie->nodes[path[d]].plain) trie->nodes[path[d]].plain = plain[d];
        }
        trie->nodes[path[n - 1]].count++;
        if (n == 1) trie->bytes[(uint8_t)text[0]] = 1;
        if (i + 1 < trie->n_tokens) continue;
        for (size_t d = 0; d < n_path; d++) trie->nodes[path[d]].end = (uint32_t)trie->n_nodes;
        free(path);
        free(plain);
        return 1;
    }
    const int is_made = path && plain && trie->n_tokens == 0;
    free(path);
    free(plain);
    return is_made;
}

static int copy_tokens(const cpa_grammar_token *tokens, cpa_token_trie *trie) {
    const size_t n = (size_t)trie->vocabulary + 1;
    trie->names = calloc(n, sizeof *trie->names);
    trie->lengths = calloc(n, sizeof *trie->lengths);
    trie->is_special = calloc(n, 1);
    trie->tokens = malloc(n * sizeof *trie->tokens);
    if (!trie->names || !trie->lengths || !trie->is_special || !trie->tokens) return 0;
    trie->most_bytes = CPA_SPECIAL_NAME_BYTES;
    for (int64_t i = 0; i < trie->vocabulary; i++) {
        const size_t bytes = tokens[i].bytes;
        if (!tokens[i].text || bytes == 0 || bytes > MOST_TOKEN_BYTES) continue;
        /* A byte that no text has would else spell the name of a special token. */
        if (!tokens[i].is_special && memchr(tokens[i].text, CPA_SPECIAL_LEAD, bytes)) continue;
        trie->names[i] = malloc(bytes);
        if (!trie->names[i]) return 0;
        memcpy(trie->names[i], tokens[i].text, bytes);
        trie->lengths[i] = (uint32_t)bytes;
        trie->is_special[i] = tokens[i].is_special != 0;
        if ((int64_t)bytes > trie->most_bytes) trie->most_bytes = (int64_t)bytes;
        trie->tokens[trie->n_tokens++] = (uint32_t)i;
    }
    qsort_r(trie->tokens, (size_t)trie->n_tokens, sizeof *trie->tokens, compare_tokens, trie);
    return 1;
}

cpa_status cpa_token_trie_make(const cpa_grammar_token *tokens, int64_t vocabulary, cpa_token_trie *out,
                               cpa_error *err) {
    cpa_token_trie trie = {.vocabulary = vocabulary};
    if (!copy_tokens(tokens, &trie) || !make_nodes(&trie)) {
        cpa_token_trie_release(&trie);
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the tokens of a vocabulary");
    }
    *out = trie;
    return CPA_OK;
}

void cpa_token_trie_release(cpa_token_trie *trie) {
    for (int64_t i = 0; trie->names && i < trie->vocabulary; i++) free(trie->names[i]);
    free(trie->names);
    free(trie->lengths);
    free(trie->is_special);
    free(trie->tokens);
    free(trie->nodes);
    *trie = (cpa_token_trie){.vocabulary = 0};
}

const char *cpa_token_trie_bytes(const cpa_token_trie *trie, uint32_t token, size_t *bytes) {
    *bytes = 0;
    if (token >= (uint64_t)trie->vocabulary || !trie->names[token]) return NULL;
    *bytes = trie->lengths[token];
    return trie->names[token];
}

int64_t cpa_token_trie_special(const cpa_token_trie *trie, const char *text, size_t bytes) {
    for (int64_t i = 0; i < trie->vocabulary; i++) {
        if (trie->is_special[i] && trie->lengths[i] == bytes && memcmp(trie->names[i], text, bytes) == 0) return i;
    }
    return -1;
}
