/* Which command a line is, and the lines that say what there is. */
#include <stdlib.h>
#include <string.h>

#include "program/commands.h"
#include "tests/fixtures/unit.h"

enum { MOST_WORDS = 5 };

static cpa_command command_of(const char *a, const char *b) {
    char program[] = "cp_attn", words[2][32];
    char *argv[] = {program, words[0], words[1], NULL};
    snprintf(words[0], sizeof words[0], "%s", a ? a : "");
    snprintf(words[1], sizeof words[1], "%s", b ? b : "");
    return cpa_command_of(b ? 3 : a ? 2 : 1, argv);
}

static void the_most_words_decide(void) {
    CU_ASSERT_EQUAL(command_of(NULL, NULL), CPA_COMMAND_RUN);
    CU_ASSERT_EQUAL(command_of("--trace", "serve"), CPA_COMMAND_RUN);
    CU_ASSERT_EQUAL(command_of("sirve", NULL), CPA_COMMAND_RUN);
    CU_ASSERT_EQUAL(command_of("serve", "--port"), CPA_COMMAND_SERVE);
    CU_ASSERT_EQUAL(command_of("generate", NULL), CPA_COMMAND_GENERATE);
    CU_ASSERT_EQUAL(command_of("bench", NULL), CPA_COMMAND_BENCH);
    CU_ASSERT_EQUAL(command_of("bench", "attend"), CPA_COMMAND_BENCH);
    CU_ASSERT_EQUAL(command_of("bench", "serve"), CPA_COMMAND_BENCH_SERVE);
    CU_ASSERT_EQUAL(command_of("plot", "serve"), CPA_COMMAND_PLOT);
    CU_ASSERT_EQUAL(command_of("check", "file"), CPA_COMMAND_CHECK);
}

/* Each word of the list is a command, and each command has its line of usage. */
static void every_command_is_told(void) {
    char list[96], little[8], usage[1024] = "";
    CU_ASSERT_STRING_EQUAL(cpa_commands_list("'", list, sizeof list),
                           "'serve', 'generate', 'bench', 'plot' or 'check'");
    CU_ASSERT_STRING_EQUAL(cpa_commands_list("", little, sizeof little), "serve, ");
    FILE *out = fmemopen(usage, sizeof usage, "w");
    for (int c = 0; c < CPA_COMMANDS; c++) cpa_command_print_usage((cpa_command)c, "", out);
    fclose(out);
    CU_ASSERT_PTR_NOT_NULL(strstr(usage, "mpirun -np N cp_attn [options]    run requests"));
    cpa_commands_list("", list, sizeof list);
    for (char *rest = list, *word; (word = strsep(&rest, ", ")) != NULL;) {
        char line[64];
        if (!word[0] || strcmp(word, "or") == 0) continue;
        snprintf(line, sizeof line, "cp_attn %s ", word);
        CU_ASSERT_PTR_NOT_NULL(strstr(usage, line));
        CU_ASSERT_NOT_EQUAL(command_of(word, NULL), CPA_COMMAND_RUN);
    }
}

static void a_line_can_be_given_to_a_shell(void) {
    char words[MOST_WORDS][32] = {"bench", "--shapes", "1x2:a=3,4", "two words", "it's"}, line[128], little[16];
    char *argv[MOST_WORDS];
    for (int i = 0; i < MOST_WORDS; i++) argv[i] = words[i];
    CU_ASSERT_STRING_EQUAL(cpa_command_line(4, MOST_WORDS, argv, line, sizeof line),
                           "mpirun -np 4 cp_attn bench --shapes 1x2:a=3,4 'two words' 'it'\\''s'");
    CU_ASSERT_STRING_EQUAL(cpa_command_line(4, MOST_WORDS, argv, little, sizeof little), "mpirun -np 4 cp");
}

static const cpa_test tests[] = {
    {"the most words decide", the_most_words_decide},
    {"every command is told", every_command_is_told},
    {"a line can be given to a shell", a_line_can_be_given_to_a_shell},
};
CPA_TEST_MAIN("commands", tests)
