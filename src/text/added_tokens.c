#include "src/text/added_tokens.h"

#include <stdlib.h>

#include <unictype.h>

#include "base/array.h"
#include "src/text/unicode.h"
#include "src/text/utf8.h"
#include "src/text/vocabulary.h"

static int add_node(cpa_added_tokens *tokens) {
    if (!cpa_array_reserve(&tokens->nodes, &tokens->capacity, tokens->count + 1, sizeof *tokens->nodes)) return 0;
    tokens->nodes[tokens->count++] = (struct cpa_added_token){.id = CPA_NO_ID};
    return 1;
}

int cpa_added_tokens_add(cpa_added_tokens *tokens, const char *text, size_t bytes, uint32_t id, int flags) {
    uint32_t node = 0;
    if (tokens->count == 0 && !add_node(tokens)) return 0;
    for (size_t i = 0; i < bytes; i++) {
        const cpa_pair *child = cpa_pair_table_find(&tokens->children, node, (unsigned char)text[i]);
        const uint32_t parent = node;
        node = child ? child->first : (uint32_t)tokens->count;
        if (!child &&
            (!add_node(tokens) || !cpa_pair_table_put(&tokens->children, parent, (unsigned char)text[i], node, 0)))
            return 0;
    }
    tokens->nodes[node] = (struct cpa_added_token){.id = id, .flags = flags};
    return 1;
}

void cpa_added_tokens_release(cpa_added_tokens *tokens) {
    cpa_pair_table_release(&tokens->children);
    free(tokens->nodes);
    *tokens = (cpa_added_tokens){.count = 0};
}

/* ---- Searching ---- */

/* The longest token at a place; NULL if there is none. */
static const struct cpa_added_token *token_at(const cpa_added_search *s, size_t at, size_t *end) {
    const struct cpa_added_token *found = NULL;
    uint32_t node = 0;
    for (size_t i = at; i < s->bytes; i++) {
        const cpa_pair *child = cpa_pair_table_find(&s->tokens->children, node, (unsigned char)s->text[i]);
        if (!child) break;
        node = child->first;
        if (s->tokens->nodes[node].id == CPA_NO_ID) continue;
        found = &s->tokens->nodes[node];
        *end = i + 1;
    }
    return found;
}

/* Characters of words, as in UTS 18, annex C: \w. */
static int is_word(const char *character) {
    const ucs4_t code = cpa_unicode_stand_in(cpa_utf8_code(character));
    return uc_is_property_alphabetic(code) || uc_is_general_category_withtable(code, UC_CATEGORY_MASK_M) ||
           uc_is_general_category_withtable(code, UC_CATEGORY_MASK_Nd | UC_CATEGORY_MASK_Pc) || code == 0x200c ||
           code == 0x200d;
}

static int is_single_word(const cpa_added_search *s, size_t begin, size_t end) {
    if (begin > 0 && is_word(s->text + cpa_utf8_back(s->text, begin))) return 0;
    return end == s->bytes || !is_word(s->text + end);
}

/* Takes white space beside a token in, and leaves out what the token before took in. */
static void strip(cpa_added_search *s, int flags, size_t *begin, size_t *end) {
    if (flags & CPA_ADDED_LSTRIP && *begin < s->from) *begin = s->from;
    while (flags & CPA_ADDED_LSTRIP && *begin > s->from) {
        const size_t before = cpa_utf8_back(s->text, *begin);
        if (!cpa_utf8_is_space(cpa_utf8_code(s->text + before))) break;
        *begin = before;
    }
    if (!(flags & CPA_ADDED_RSTRIP)) return;
    if (*end < s->spaces_end) *end = s->spaces_end;
    while (*end < s->bytes && cpa_utf8_is_space(cpa_utf8_code(s->text + *end))) *end += cpa_utf8_length(s->text[*end]);
    s->spaces_end = *end;
}

cpa_added_search cpa_added_tokens_begin(const cpa_added_tokens *tokens, const char *text, size_t bytes) {
    return (cpa_added_search){.tokens = tokens, .text = text, .bytes = bytes, .token_id = CPA_NO_ID};
}

/* Finds the next token from s->at on; 0 if there is none. */
static int find(cpa_added_search *s, size_t *begin, size_t *end, uint32_t *id) {
    while (s->tokens->count > 0 && s->at < s->bytes) {
        const size_t at = s->at;
        const struct cpa_added_token *token = token_at(s, at, end);
        if (!token) {
            s->at++;
            continue;
        }
        s->at = *end; /* a token that does not count is not searched for others either */
        if (token->flags & CPA_ADDED_SINGLE_WORD && !is_single_word(s, at, *end)) continue;
        *begin = at;
        strip(s, token->flags, begin, end);
        if (*begin >= *end) continue; /* nothing is left of it */
        *id = token->id;
        return 1;
    }
    return 0;
}

int cpa_added_tokens_next(cpa_added_search *s, size_t *begin, size_t *end, uint32_t *id) {
    size_t token_begin = s->bytes, token_end = s->bytes;
    *begin = s->from;
    if (s->token_id != CPA_NO_ID) { /* found behind the piece before */
        *end = s->from = s->token_end;
        *id = s->token_id;
        s->token_id = CPA_NO_ID;
        return 1;
    }
    *id = CPA_NO_ID;
    const int found = find(s, &token_begin, &token_end, id);
    if (!found) token_begin = s->bytes;
    if (token_begin > s->from) { /* text first */
        s->token_id = *id;
        s->token_end = token_end;
        *id = CPA_NO_ID;
        *end = s->from = token_begin;
        return 1;
    }
    *begin = token_begin; /* before s->from if it is white space that the token before took in, but a token itself */
    *end = s->from = token_end;
    return found;
}
