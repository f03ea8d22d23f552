/* N-gram drafting, beside a search that looks at every place of the history. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cpattn/ngram.h>

#include "base/hash.h"
#include "tests/fixtures/unit.h"

enum { DRAFTS = 6 };

/* The longest n-gram first, the last place of it: what follows there, and behind the end what was drafted. */
static int64_t search(const uint32_t *tokens, int64_t n, int32_t min, int32_t max, int64_t most, uint32_t *drafts) {
    for (int32_t length = max; length >= min; length--) {
        for (int64_t next = n - 1; next >= length; next--) {
            if (memcmp(tokens + next - length, tokens + n - length, (size_t)length * sizeof *tokens) != 0) continue;
            for (int64_t i = 0; i < most; i++) drafts[i] = next + i < n ? tokens[next + i] : drafts[next + i - n];
            return most;
        }
    }
    return 0;
}

static cpa_ngram *create(int32_t min, int32_t max, int32_t branches) {
    const cpa_ngram_options options = {sizeof options, min, max, branches};
    cpa_ngram *ngram = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_ngram_create(&options, &ngram, NULL), CPA_OK);
    return ngram;
}

static void drafts_are_those_of_a_search_of_the_whole_history(void) {
    static const struct {
        int32_t min, max, vocabulary;
    } cases[] = {{1, 1, 3}, {1, 3, 2}, {2, 4, 4}, {3, 3, 3}, {2, 16, 2}, {5, 5, 2}};
    int64_t found = 0, missed = 0;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        uint32_t tokens[700], drafts[DRAFTS], expected[DRAFTS];
        cpa_ngram *ngram = create(cases[c].min, cases[c].max, 0);
        for (int64_t n = 0; n < 700;) {
            const int64_t more = 1 + (int64_t)(cpa_mix64((uint64_t)n) % 5);
            for (int64_t i = n; i < n + more && i < 700; i++)
                tokens[i] = (uint32_t)(cpa_mix64(c * 7919 + (uint64_t)i) % (uint64_t)cases[c].vocabulary);
            const int64_t end = n + more < 700 ? n + more : 700, most = 1 + n % DRAFTS;
            CU_ASSERT_EQUAL_FATAL(cpa_ngram_add(ngram, tokens + n, end - n, NULL), CPA_OK);
            n = end;
            CU_ASSERT_EQUAL(cpa_ngram_count(ngram), n);
            const int64_t drafted = cpa_ngram_draft(ngram, most, drafts);
            CU_ASSERT_EQUAL_FATAL(drafted, search(tokens, n, cases[c].min, cases[c].max, most, expected));
            CU_ASSERT_EQUAL(memcmp(drafts, expected, (size_t)drafted * sizeof *drafts), 0);
            found += drafted > 0;
            missed += drafted == 0;
        }
        cpa_ngram_destroy(ngram);
    }
    CPA_ASSERT_ORDER(found, >, 100);
    CPA_ASSERT_ORDER(missed, >, 20);
}

/* The branches of a tree by a search: where each begins. */
static int64_t search_tree(const uint32_t *tokens, int64_t n, int32_t min, int32_t max, int64_t branches,
                           int64_t *begins) {
    int64_t found = 0;
    for (int32_t length = max; length >= min; length--)
        for (int64_t next = n - 1; next >= length && found < branches && n > length; next--) {
            int is_new = memcmp(tokens + next - length, tokens + n - length, (size_t)length * sizeof *tokens) == 0;
            for (int64_t b = 0; b < found; b++) is_new &= tokens[begins[b]] != tokens[next];
            if (is_new) begins[found++] = next;
        }
    return found;
}

static void branches_begin_with_different_tokens(void) {
    enum { TOKENS = 60, EACH = 2, BRANCHES = 3, MOST = BRANCHES * EACH };
    int64_t forked = 0;
    for (uint64_t text = 0; text < 20; text++) {
        uint32_t tokens[TOKENS], drafts[MOST];
        int32_t parents[MOST];
        cpa_ngram *ngram = create(1, 3, BRANCHES);
        for (int64_t n = 0; n < TOKENS; n++) {
            int64_t begins[BRANCHES];
            const int64_t branches = search_tree(tokens, n, 1, 3, BRANCHES, begins);
            CU_ASSERT_EQUAL_FATAL(cpa_ngram_draft_tree(ngram, MOST, drafts, parents), branches * EACH);
            for (int64_t b = 0; b < branches; b++) {
                CU_ASSERT_EQUAL(drafts[b * EACH], tokens[begins[b]]);
                CU_ASSERT(begins[b] + 1 == n || drafts[b * EACH + 1] == tokens[begins[b] + 1]);
                CU_ASSERT(parents[b * EACH] == -1 && parents[b * EACH + 1] == b * EACH);
            }
            forked += branches > 1;
            tokens[n] = (uint32_t)(cpa_mix64(text * 131 + (uint64_t)n) % 5);
            CU_ASSERT_EQUAL_FATAL(cpa_ngram_add(ngram, tokens + n, 1, NULL), CPA_OK);
        }
        cpa_ngram_destroy(ngram);
    }
    CPA_ASSERT_ORDER(forked, >, 200);
}

static void a_text_that_repeats_itself_goes_on(void) {
    static const uint32_t tokens[] = {9, 1, 2, 1, 2}, expected[] = {1, 2, 1, 2, 1, 2};
    uint32_t drafts[DRAFTS];
    cpa_ngram *ngram = create(2, 2, 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft(ngram, DRAFTS, drafts), 0);
    CU_ASSERT_EQUAL(cpa_ngram_add(ngram, tokens, 5, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_ngram_draft(ngram, DRAFTS, drafts), DRAFTS);
    CU_ASSERT_EQUAL(memcmp(drafts, expected, sizeof expected), 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft(ngram, 0, drafts), 0);
    cpa_ngram_destroy(ngram);
}

/* A search would look at 10^12 places. */
static void a_draft_costs_the_same_however_long_the_history_is(void) {
    enum { TOKENS = 1 << 20 };
    const clock_t begin = clock();
    uint32_t drafts[DRAFTS];
    int64_t found = 0;
    cpa_ngram *ngram = create(2, 4, 0);
    for (int64_t i = 0; i < TOKENS; i++) {
        const uint32_t token = (uint32_t)(cpa_mix64((uint64_t)i) % 1000);
        CU_ASSERT_EQUAL_FATAL(cpa_ngram_add(ngram, &token, 1, NULL), CPA_OK);
        found += cpa_ngram_draft(ngram, 4, drafts) > 0;
    }
    cpa_ngram_destroy(ngram);
    CPA_ASSERT_ORDER(found, >, TOKENS / 4);
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    CPA_ASSERT_ORDER(seconds, <, 20);
    printf("%.2f us a token ... ", seconds / TOKENS * 1e6);
}

static void lengths_that_make_no_sense_are_refused(void) {
    static const int32_t bad[][3] = {{-1, 4, 0}, {5, 4, 0}, {2, 17, 0}, {17, 0, 0}, {2, 4, 65}, {2, 4, -1}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const cpa_ngram_options options = {sizeof options, bad[i][0], bad[i][1], bad[i][2]};
        cpa_ngram *ngram = NULL;
        cpa_error err;
        CU_ASSERT_EQUAL(cpa_ngram_create(&options, &ngram, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, bad[i][2] == 0 ? "expected 1 to 16" : "expected 0 to 64"));
        CU_ASSERT_PTR_NULL(ngram);
    }
    cpa_ngram_destroy(NULL);
}

static void what_is_no_history_or_no_tokens_is_refused(void) {
    const uint32_t tokens[] = {1, 2, 3, 1, 2};
    uint32_t drafts[DRAFTS];
    int32_t parents[DRAFTS];
    cpa_ngram *ngram = create(1, 2, 0);
    CU_ASSERT_EQUAL(cpa_ngram_create(NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_ngram_add(NULL, tokens, 1, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_ngram_add(ngram, NULL, 1, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_ngram_add(ngram, NULL, 0, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_ngram_add(ngram, tokens, -3, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_ngram_count(ngram), 0);
    CU_ASSERT_EQUAL(cpa_ngram_count(NULL), 0);
    CU_ASSERT_EQUAL(cpa_ngram_add(ngram, tokens, 5, NULL), CPA_OK); /* as if nothing had been */
    CU_ASSERT_EQUAL(cpa_ngram_draft(ngram, 1, NULL), 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft(NULL, 1, drafts), 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft_tree(ngram, 1, drafts, NULL), 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft_tree(NULL, 1, drafts, parents), 0);
    CU_ASSERT_EQUAL(cpa_ngram_draft(ngram, 1, drafts), 1);
    CU_ASSERT_EQUAL(drafts[0], 3);
    cpa_ngram_destroy(ngram);
}

static const cpa_test tests[] = {
    {"drafts are those of a search of the whole history", drafts_are_those_of_a_search_of_the_whole_history},
    {"branches begin with different tokens", branches_begin_with_different_tokens},
    {"a text that repeats itself goes on", a_text_that_repeats_itself_goes_on},
    {"a draft costs the same however long the history is", a_draft_costs_the_same_however_long_the_history_is},
    {"lengths that make no sense are refused", lengths_that_make_no_sense_are_refused},
    {"what is no history, or no tokens, is refused", what_is_no_history_or_no_tokens_is_refused},
};

CPA_TEST_MAIN("n-grams", tests)
