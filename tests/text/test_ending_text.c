/* The text of an answer ends at a text that stops it, however its tokens cut either. */
#include "src/text/ending_text.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"

static cpa_tokenizer *tokenizer;

/* What is said of the tokens of `words`, piece by piece, in `said`; the text is left open. */
static void say(cpa_ending_text *text, const char *words, char *said) {
    cpa_token_list ids = {.count = 0};
    CU_ASSERT_EQUAL_FATAL(cpa_tokenizer_encode(tokenizer, words, strlen(words), 0, &ids, NULL), CPA_OK);
    said[0] = 0;
    for (int64_t i = 0; i < ids.count; i++) {
        CU_ASSERT_EQUAL(cpa_ending_text_push(text, ids.ids[i], NULL), CPA_OK);
        strncat(said, text->text.data ? text->text.data : "", (size_t)text->ready);
        cpa_ending_text_forget(text);
    }
    free(ids.ids);
}

static cpa_ending_text open_text(const cpa_stop_text *stops, int n) {
    cpa_ending_text text;
    CU_ASSERT_EQUAL_FATAL(cpa_ending_text_open(tokenizer, 0, &text, NULL), CPA_OK);
    text.stops = stops;
    text.n_stops = n;
    return text;
}

static char end_word[] = "END", enough[] = "is enough";
static const cpa_stop_text stops[] = {{end_word, 3}, {enough, 9}};

static void nothing_is_said_from_the_stop_on(void) {
    char said[128];
    cpa_ending_text text = open_text(stops, 2);
    say(&text, "This is enough, END of it", said);
    CU_ASSERT_STRING_EQUAL(said, "This ");
    CU_ASSERT_STRING_EQUAL(text.stop->text, "is enough");
    CPA_ASSERT_ORDER(text.tokens, <, 20);
    cpa_ending_text_close(&text);
    text = open_text(stops, 2);
    text.keeps_stop = 1;
    say(&text, "The END of it", said);
    CU_ASSERT_STRING_EQUAL(said, "The END");
    cpa_ending_text_close(&text);
}

static void what_begins_like_a_stop_waits(void) {
    char said[128];
    cpa_ending_text text = open_text(stops, 2);
    say(&text, "The EN", said);
    CU_ASSERT_STRING_EQUAL(said, "The ");
    CU_ASSERT_EQUAL(cpa_ending_text_finish(&text, NULL), CPA_OK);
    CU_ASSERT_EQUAL(text.ready, 2);
    CU_ASSERT_EQUAL(memcmp(text.text.data, "EN", 2), 0);
    CU_ASSERT_TRUE(text.stop == NULL);
    cpa_ending_text_close(&text);
}

static void no_stop_begins_within_min_tokens(void) {
    char said[128];
    cpa_ending_text text = open_text(stops, 2);
    text.min_tokens = 100;
    say(&text, "The END of it", said);
    CU_ASSERT_STRING_EQUAL(said, "The END of it");
    cpa_ending_text_close(&text);
}

static const cpa_test tests[] = {
    {"nothing is said from the stop on", nothing_is_said_from_the_stop_on},
    {"what begins like a stop waits", what_begins_like_a_stop_waits},
    {"no stop begins within min tokens", no_stop_begins_within_min_tokens},
};

int main(int argc, char **argv) {
    cpa_error err;
    if (cpa_tokenizer_open(CPA_TEST_DATA "/tiny-llama", &tokenizer, &err) != CPA_OK) return 1;
    const int code = cpa_test_main(argc, argv, "texts that end", tests, (int)(sizeof tests / sizeof tests[0]));
    cpa_tokenizer_close(tokenizer);
    return code;
}
