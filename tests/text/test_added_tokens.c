/* Added tokens in texts: which are found, and what white space they take in. Ids are those that the package tokenizers
 * gives for the same tokens. */
#include "src/text/added_tokens.h"

#include <string.h>

#include "src/text/vocabulary.h"
#include "tests/fixtures/unit.h"

enum { RIGHT, NEWLINE, BOTH, SPACES, WORD, N_TOKENS };
#define TEXT CPA_NO_ID

/* Whether the pieces of a text are these n, and none is empty. */
static int has_pieces(const cpa_added_tokens *tokens, const char *text, const uint32_t *ids, int n) {
    cpa_added_search search = cpa_added_tokens_begin(tokens, text, strlen(text));
    size_t begin, end;
    uint32_t id;
    int i = 0, ok = 1;
    for (; cpa_added_tokens_next(&search, &begin, &end, &id); i++) ok &= i < n && id == ids[i] && begin < end;
    return ok && i == n;
}

static void white_space_that_a_token_took_in_may_hold_others(void) {
    static const struct {
        const char *text;
        int n;
        uint32_t ids[8];
    } cases[] = {
        {"<x> \n\n", 3, {RIGHT, NEWLINE, NEWLINE}},
        {"a<x>\n b", 4, {TEXT, RIGHT, NEWLINE, TEXT}},
        {"\t\t\t \n", 2, {BOTH, NEWLINE}},
        {"      ", 3, {SPACES, SPACES, SPACES}},
        {"<x>    \n\tb", 6, {RIGHT, SPACES, SPACES, NEWLINE, BOTH, TEXT}},
        {" \t \n", 2, {BOTH, NEWLINE}},
        {"<x>\t<x>", 2, {RIGHT, RIGHT}},
        {"a fox foxes", 3, {TEXT, WORD, TEXT}},
    };
    static const struct {
        const char *text;
        int flags;
    } added[N_TOKENS] = {{"<x>", CPA_ADDED_RSTRIP},
                         {"\n", 0},
                         {"\t", CPA_ADDED_LSTRIP | CPA_ADDED_RSTRIP},
                         {"  ", CPA_ADDED_RSTRIP},
                         {"fox", CPA_ADDED_SINGLE_WORD}};
    cpa_added_tokens tokens = {.count = 0};
    for (uint32_t i = 0; i < N_TOKENS; i++)
        CU_ASSERT(cpa_added_tokens_add(&tokens, added[i].text, strlen(added[i].text), i, added[i].flags));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CU_ASSERT(has_pieces(&tokens, cases[i].text, cases[i].ids, cases[i].n));
    cpa_added_tokens_release(&tokens);
}

static const cpa_test TESTS[] = {
    {"white space that a token took in may hold others", white_space_that_a_token_took_in_may_hold_others},
};
CPA_TEST_MAIN("added tokens", TESTS)
