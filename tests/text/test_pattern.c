/* A pattern for which PCRE2 has no memory is not called wrong. */
#include "src/text/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "tests/fixtures/unit.h"

static int lacks_memory;

pcre2_code *__real_pcre2_compile_8(PCRE2_SPTR8 text, PCRE2_SIZE bytes, uint32_t options, int *code, PCRE2_SIZE *at,
                                   pcre2_compile_context_8 *context);
pcre2_code *__wrap_pcre2_compile_8(PCRE2_SPTR8 text, PCRE2_SIZE bytes, uint32_t options, int *code, PCRE2_SIZE *at,
                                   pcre2_compile_context_8 *context);

pcre2_code *__wrap_pcre2_compile_8(PCRE2_SPTR8 text, PCRE2_SIZE bytes, uint32_t options, int *code, PCRE2_SIZE *at,
                                   pcre2_compile_context_8 *context) {
    if (!lacks_memory) return __real_pcre2_compile_8(text, bytes, options, code, at, context);
    *code = PCRE2_ERROR_HEAP_FAILED;
    return NULL;
}

static void want_of_memory_is_told_from_a_wrong_pattern(void) {
    const cpa_json json = {.path = "tokenizer.json", .prefix = ""};
    cpa_pattern *pattern = NULL;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_pattern_open(&json, "Regex", "\\p{L}+", 0, &pattern, &err), CPA_OK);
    cpa_pattern_close(pattern);
    CU_ASSERT_EQUAL(cpa_pattern_open(&json, "Regex", "(", 0, &pattern, &err), CPA_UNSUPPORTED);
    lacks_memory = 1;
    CU_ASSERT_EQUAL(cpa_pattern_open(&json, "Regex", "\\p{L}+", 0, &pattern, &err), CPA_NO_MEMORY);
    CU_ASSERT_STRING_EQUAL(err.message, "tokenizer.json: no memory for a pattern");
    lacks_memory = 0;
}

static const cpa_test tests[] = {
    {"want of memory is told from a wrong pattern", want_of_memory_is_told_from_a_wrong_pattern},
};

CPA_TEST_MAIN("patterns", tests)
