/* The settings table, its layers (command line, environment, file, default), and the files under configs/. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "launcher/settings/model_file.h"
#include "launcher/settings/settings_check.h"
#include "launcher/settings/settings_table.h"
#include "tests/fixtures/unit.h"

#define MAX_ARGS 16

/* Loads the settings of a command line written with single spaces. */
static cpa_status load(const char *line, cpa_settings *out, cpa_error *err) {
    static char text[1024];
    char *argv[MAX_ARGS] = {(char[]){"cp_attn"}};
    int argc = 1;
    snprintf(text, sizeof text, "%s", line);
    for (char *word = strtok(text, " "); word && argc < MAX_ARGS; word = strtok(NULL, " ")) argv[argc++] = word;
    err->message[0] = 0;
    return cpa_settings_load(argc, argv, out, err);
}

/* Writes `text` to a new file and gives its name, which the caller unlinks. */
static char *write_file(const char *text) {
    static char name[32];
    strcpy(name, "settings-XXXXXX");
    int descriptor = mkstemp(name);
    CU_ASSERT_FATAL(descriptor >= 0);
    CU_ASSERT_FATAL(write(descriptor, text, strlen(text)) == (ssize_t)strlen(text));
    close(descriptor);
    return name;
}

/* Loads a settings file of that text, with more options after --config. */
static cpa_status load_file(const char *text, const char *more, cpa_settings *out, cpa_error *err) {
    char line[256];
    char *name = write_file(text);
    snprintf(line, sizeof line, "--config %s %s", name, more);
    cpa_status status = load(line, out, err);
    unlink(name);
    return status;
}

static void command_line_goes_over_environment_over_file_over_default(void) {
    cpa_settings settings;
    cpa_error err;
    const char *file = "block-size: 32\nmax-num-seqs: 32\nseed: 32\n";
    setenv("CPATTN_MAX_NUM_SEQS", "64", 1);
    setenv("CPATTN_SEED", "64", 1);
    cpa_status status = load_file(file, "--seed 128", &settings, &err);
    unsetenv("CPATTN_MAX_NUM_SEQS");
    unsetenv("CPATTN_SEED");
    CU_ASSERT_EQUAL_FATAL(status, CPA_OK);
    CU_ASSERT_EQUAL(settings.max_num_batched_tokens, 2048);
    CU_ASSERT_EQUAL(settings.block_size, 32);
    CU_ASSERT_EQUAL(settings.max_num_seqs, 64);
    CU_ASSERT_EQUAL(settings.seed, 128);
    CU_ASSERT(!cpa_settings_given(&settings, "max-num-batched-tokens"));
    CU_ASSERT(cpa_settings_given(&settings, "block-size"));
}

static void every_form_of_an_option_is_read(void) {
    cpa_settings settings;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(
        load("--block-size=64 --max_num_seqs 3 --no-bind --skip-self-test --verify 0.25 --algorithm pass-q "
             "--kv-cache-dtype bf16 --num-blocks auto --window 0",
             &settings, &err),
        CPA_OK);
    CU_ASSERT_EQUAL(settings.block_size, 64);
    CU_ASSERT_EQUAL(settings.max_num_seqs, 3);
    CU_ASSERT_EQUAL(settings.bind, 0);
    CU_ASSERT_EQUAL(settings.skip_self_test, 1);
    CU_ASSERT_EQUAL(settings.verify, 0.25);
    CU_ASSERT_EQUAL(settings.algorithm, CPA_PASS_Q);
    CU_ASSERT_EQUAL(settings.kv_cache_dtype - 1, CPA_BF16);
    CU_ASSERT_EQUAL(settings.num_blocks, 0);
    CU_ASSERT_EQUAL(settings.window, 0);
    CU_ASSERT_EQUAL(settings.sinks, -1);
    CU_ASSERT(isinf(settings.request_rate));
}

static void formats_are_known_by_the_names_of_others(void) {
    const struct {
        const char *word;
        cpa_dtype dtype;
    } names[] = {{"bfloat16", CPA_BF16},
                 {"half", CPA_F16},
                 {"float", CPA_F32},
                 {"fp8", CPA_FP8_E4M3},
                 {"float16", CPA_F16},
                 {"turboquant_int8", CPA_INT8},
                 {"fp8_ds_mla", CPA_FP8_T128},
                 {"fp8_t64", CPA_FP8_T64},
                 {"turboquant_k8v4", CPA_TQ_K8V4},
                 {"turboquant_3bit_nc", CPA_TQ_3BIT}};
    cpa_settings settings;
    cpa_error err;
    char line[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(line, sizeof line, "--kv-cache-dtype %s", names[i].word);
        CU_ASSERT_EQUAL_FATAL(load(line, &settings, &err), CPA_OK);
        CU_ASSERT_EQUAL(settings.kv_cache_dtype - 1, names[i].dtype);
    }
    CU_ASSERT_EQUAL(load("--dtype float32 --kv-cache-dtype auto --kv-layout HND", &settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(settings.dtype - 1, CPA_F32);
    CU_ASSERT_EQUAL(settings.kv_cache_dtype, 0);
    CU_ASSERT_EQUAL(settings.kv_layout, CPA_HEAD_MAJOR);
    CU_ASSERT_EQUAL(load("--dtype fp8", &settings, &err), CPA_INVALID); /* a dtype, but none of tensors */
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected one of auto, fp32"));
    CU_ASSERT_EQUAL(load("--kv-cache-dtype turboquant_2bit", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "--kv-cache-dtype: found 'turboquant_2bit', expected one of"));
}

static void bounds_of_every_setting_are_kept(void) {
    const cpa_field *table = cpa_settings_rows;
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        cpa_settings settings;
        cpa_error err;
        char line[128];
        if (table[f].type != CPA_FIELD_INT && table[f].type != CPA_FIELD_REAL) continue;
        snprintf(line, sizeof line, "--%s=%.0f", table[f].name, floor(table[f].min) - 1);
        CU_ASSERT_EQUAL(load(line, &settings, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, table[f].name));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected"));
        if (isinf(table[f].max)) continue;
        snprintf(line, sizeof line, "--%s=%.0f", table[f].name, table[f].max * 2 + 1);
        CU_ASSERT_EQUAL(load(line, &settings, &err), CPA_INVALID);
        snprintf(line, sizeof line, "--%s=nan", table[f].name);
        CU_ASSERT_EQUAL(load(line, &settings, &err), CPA_INVALID);
    }
}

/* A command line, and what its message must say. */
static void a_bad_command_line_is_refused_in_one_line(void) {
    static const char *const cases[][2] = {
        {"--blok-size 16", "'--blok-size', expected '--block-size'"},
        {"--num-block 16", "expected '--num-blocks'"},
        {"--xyzzyzzyx", "unknown option '--xyzzyzzyx'"},
        {"--no-block-size", "unknown option '--no-block-size'"},
        {"--no-bind=1", "unknown option"},
        {"server", "found 'server', expected an option (--help lists them), 'serve',"},
        {"--port 80", "--port: found without 'serve', expected with it"},
        {"serve --port 65536", "--port: found '65536', expected an integer from 0 to 65535"},
        {"serve --trace t.jsonl", "--trace: found with 'serve', expected without it"},
        {"serve --requests 3", "--requests: found with 'serve'"},
        {"serve --check-logits 3", "--check-logits: found with 'serve'"},
        {"serve --prompt-ids 3", "--prompt-ids: found without 'generate'"},
        {"--prompt a", "--prompt: found without 'generate'"},
        {"generate --model-dir m --prompt a --prompt-ids 3", "--prompt-ids: found with --prompt, expected one of them"},
        {"generate --model-dir m --prompt-ids 3 --chat", "--chat: found without --prompt, expected with it"},
        {"generate --model-dir m --prompt-ids 3 --stop a", "--stop: found without --prompt, expected with it"},
        {"generate --model-dir m --prompt a --system b", "--system: found without --chat, expected with it"},
        {"generate --model-dir m --prompt a --chat-template chatml",
         "--chat-template: found without 'serve' or --chat"},
        {"generate --cache-salt a --requests 3", "--requests: found with 'generate', expected without it"},
        {"serve generate", "found 'generate'"},
        {"serve --gpu-memory-utilization 1.5", "expected a number from 0.01 to 1"},
        {"--block-size", "--block-size: found no value"},
        {"--block-size --seed 3", "--block-size: found no value"},
        {"--block-size 1024", "--block-size: found '1024', expected a power of two between 1 and 512"},
        {"--dry-run --timeline t.json", "--timeline: found with --dry-run, expected without it"},
        {"--timeline t.json --result-json t.json", "--timeline: found the file of --result-json"},
        {"--dry-run --metrics-file m", "--metrics-file: found with --dry-run, expected without it"},
        {"--metrics-file t.json --timeline t.json", "--metrics-file: found the file of --timeline"},
        {"--k-scale 0 --v-scale 1",
         "--k-scale: found '0', expected a number from 1.17549e-38 to 1e+30, or one for each KV head"},
        {"--block-size 24", "--block-size: found '24', expected a power of two between 1 and 512"},
        {"--block-size 16x", "found '16x'"},
        {"--requests 99999999999999999999", "expected an integer from 1 to 1048576 or all"},
        {"--requests 0", "--requests: found '0', expected an integer from 1 to 1048576 or all"},
        {"--seed 4611686018427387905", "expected an integer from 0 to 4611686018427387904"},
        {"--verify 1.5", "expected a number from 0 to 1"},
        {"--algorithm ring", "expected one of auto, pass-kv, pass-q"},
        {"--bind=maybe", "expected true or false"},
        {"--length-scale 0.5", "--length-scale: found without --trace"},
        {"--time-scale 1", "--time-scale: found without --trace"},
        {"--speculative ngram",
         "--speculative: found 'ngram', expected off, mtp:1, ngram:K, ngram:KxB or these with :MIN..MAX, K of 1 to "
         "1024"},
        {"--speculative ngram:0", "found 'ngram:0'"},
        {"--speculative ngram:4x", "found 'ngram:4x'"},
        {"--speculative ngram:4x1", "found 'ngram:4x1'"},
        {"--speculative ngram:17x64", "found 'ngram:17x64'"},
        {"--speculative ngram:4:3", "found 'ngram:4:3'"},
        {"--speculative ngram:4:3..2", "found 'ngram:4:3..2'"},
        {"--speculative ngram:4:2..17", "found 'ngram:4:2..17'"},
        {"--speculative eagle:4", "found 'eagle:4'"},
        {"--model-dir m --speculative mtp:0", "found 'mtp:0', expected off, mtp:1"},
        {"--model-dir m --speculative mtp:2", "found 'mtp:2', expected off, mtp:1"},
        {"--speculative mtp:1", "--speculative: found mtp:1 without --model-dir"},
        {"--model-dir m --layers 1 --speculative mtp:1", "--speculative: found mtp:1 with --layers"},
        {"--speculative ngram:4 --dry-run",
         "--speculative: found with --dry-run, expected without it: no token is drawn"},
        {"generate --model-dir m --prompt-ids 3 --given-ids 4 --speculative ngram:4",
         "--speculative: found with --given-ids"},
        {"--preemption-mode swap", "--preemption-mode: found swap without --swap-space"},
        {"--swap-folder-size 2", "--swap-folder-size: found without --swap-folder, expected with it"},
        {"--device-ring 1", "--device-ring: found without --host-cache, expected with it"},
        {"--host-cache 1 --swap-space 1", "--swap-space: found with --host-cache, expected one of the two"},
        {"--host-cache 1 --kv-cache-dtype int8 --kv-cache-dtype-skip-layers 0",
         "--kv-cache-dtype-skip-layers: found with --host-cache, expected one of the two"},
        {"--precise-first-tokens 24 --kv-cache-dtype int8",
         "--precise-first-tokens: found 24, expected a multiple of the block size 16"},
        {"--precise-first-tokens 32 --kv-cache-dtype int8 --algorithm pass-kv",
         "--precise-first-tokens: found with --algorithm pass-kv, expected pass-q"},
        {"--precise-first-tokens -16 --kv-cache-dtype int8",
         "--precise-first-tokens: found '-16', expected an integer from 0"},
        {"--precise-first-tokens 32 --kv-cache-dtype int8 --sparse xattn:0.9",
         "--sparse: found with --precise-first-tokens, expected one of the two"},
        {"--precise-first-tokens 32 --kv-cache-dtype int8 --host-cache 1",
         "--host-cache: found with --precise-first-tokens, expected one of the two"},
        {"--precise-first-tokens 32 --kv-cache-dtype int8 --block-store s",
         "--block-store: found with --precise-first-tokens, expected one of the two"},
        {"--trace t --input-len 4", "--input-len: found with --trace"},
        {"--trace t --time-scale 1 --request-rate 3", "--request-rate: found with --time-scale"},
        {"--cp-kv-cache-interleave-size 24", "found 24, expected a divisor or a multiple of the block size 16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpa_settings settings;
        cpa_error err;
        CU_ASSERT_EQUAL(load(cases[i][0], &settings, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i][1]));
        CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
        if (!strstr(err.message, cases[i][1])) printf("%s -> %s\n", cases[i][0], err.message);
    }
}

static void an_alias_is_as_good_as_the_name(void) {
    static const char *const lines[] = {"--interleave 4", "--cp_kv_cache_interleave_size=4"};
    cpa_settings settings;
    cpa_error err;
    for (size_t i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(load(lines[i], &settings, &err), CPA_OK);
        CU_ASSERT_EQUAL(settings.interleave, 4);
        CU_ASSERT(cpa_settings_given(&settings, "cp-kv-cache-interleave-size"));
    }
    CU_ASSERT_EQUAL(load_file("interleave: 8\n", "", &settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(settings.interleave, 8);
    CU_ASSERT_EQUAL(load_file("interleave: 8\ncp-kv-cache-interleave-size: 8\n", "", &settings, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(load("--interleave 5", &settings, &err), CPA_INVALID);
}

/* A settings file, and what its message must say after the name of the file. */
static void a_bad_settings_file_is_refused_with_its_line(void) {
    static const char *const cases[][2] = {
        {"# a\n\nblok-size: 16\n", ":3: found unknown key 'blok-size', expected 'block-size'"},
        {"seed: 1\nblock-size: 24\n", ":2: block-size: found '24', expected a power of two"},
        {"seed: 1\nseed: 2\n", ":2: found 'seed' again, expected it once (line 1)"},
        {"max-num-seqs: 3\nmax_num_seqs: 4\n", ":2: found 'max-num-seqs' again"},
        {"seed: [1, 2]\n", ":1: seed: found a list, expected a single value"},
        {"seed:\n  a: 2\n", ": seed: found a mapping"},
        {"seed: &a 1\nblock-size: *a\n", ":2: block-size: found an alias, expected a single value"},
        {"seed: \"32\\0zzz\"\n", ":1: seed: found a value with a zero byte"},
        {"- 1\n", ":1: found a list, expected lines of 'name: value'"},
        {"word\n", ":1: found a value, expected lines of"},
        {"[1]: 2\n", ":1: found a list as a key"},
        {"seed: 1\n\ttab: 2\n", ":2: found malformed YAML"},
        {"trace: \"x\n", "found malformed YAML"},
        {"seed: 1\n---\nseed: 2\n", ":2: found a second document"},
        {"help: true\n", ":1: help: found in a file"},
        {"seed:\n", ":1: seed: found ''"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpa_settings settings;
        cpa_error err;
        CU_ASSERT_EQUAL(load_file(cases[i][0], "", &settings, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i][1]));
        CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
        if (!strstr(err.message, cases[i][1])) printf("%s -> %s\n", cases[i][0], err.message);
    }
    cpa_settings settings;
    cpa_error err;
    CU_ASSERT_EQUAL(load("--config no/such.yaml", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "no/such.yaml: found no readable file"));
    CU_ASSERT_EQUAL(load("--config /", &settings, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(load_file("# nothing\n", "", &settings, &err), CPA_OK);
}

static void who_drafts_is_read_in_one_setting(void) {
    static const struct {
        const char *line;
        cpa_speculative expected;
    } cases[] = {{"", {CPA_DRAFT_NONE, 0, 0, 0, 0}},
                 {"--speculative off", {CPA_DRAFT_NONE, 0, 0, 0, 0}},
                 {"--speculative ngram:4", {CPA_DRAFT_NGRAM, 4, 0, 0, 0}},
                 {"--speculative ngram:4x2", {CPA_DRAFT_NGRAM, 8, 2, 0, 0}},
                 {"--speculative ngram:16x64:1..2", {CPA_DRAFT_NGRAM, 1024, 64, 1, 2}},
                 {"--model-dir m --speculative mtp:1", {CPA_DRAFT_MODEL, 1, 0, 0, 0}},
                 {"serve --speculative ngram:1024:3..16", {CPA_DRAFT_NGRAM, 1024, 0, 3, 16}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpa_settings settings;
        cpa_speculative s;
        cpa_error err;
        CU_ASSERT_EQUAL_FATAL(load(cases[i].line, &settings, &err), CPA_OK);
        CU_ASSERT_EQUAL_FATAL(cpa_settings_speculative(&settings, &s, &err), CPA_OK);
        CU_ASSERT_EQUAL(s.drafter, cases[i].expected.drafter);
        CU_ASSERT_EQUAL(s.draft_tokens, cases[i].expected.draft_tokens);
        CU_ASSERT_EQUAL(s.ngram_branches, cases[i].expected.ngram_branches);
        CU_ASSERT(s.ngram_min == cases[i].expected.ngram_min && s.ngram_max == cases[i].expected.ngram_max);
    }
}

static void the_environment_is_checked_like_the_command_line(void) {
    cpa_settings settings;
    cpa_error err;
    setenv("CPATTN_CP_KV_CACHE_INTERLEAVE_SIZE", "x", 1);
    CU_ASSERT_EQUAL(load("", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "CPATTN_CP_KV_CACHE_INTERLEAVE_SIZE: found 'x'"));
    setenv("CPATTN_CP_KV_CACHE_INTERLEAVE_SIZE", "", 1); /* empty counts as not set */
    setenv("CPATTN_TEST_SOMETHING", "1", 1);
    CU_ASSERT_EQUAL(load("", &settings, &err), CPA_OK);
    unsetenv("CPATTN_TEST_SOMETHING");
    setenv("CPATTN_BLOK_SIZE", "16", 1);
    CU_ASSERT_EQUAL(load("", &settings, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "CPATTN_BLOK_SIZE: found an unknown variable, expected CPATTN_BLOCK_SIZE?");
    unsetenv("CPATTN_BLOK_SIZE");
    unsetenv("CPATTN_CP_KV_CACHE_INTERLEAVE_SIZE");
}

/* What is printed, until the next call. */
static char *printed(void (*print)(const cpa_settings *, FILE *), const cpa_settings *settings) {
    static char text[1 << 16];
    FILE *file = fmemopen(text, sizeof text, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    print(settings, file);
    fclose(file);
    return text;
}

static void print_settings(const cpa_settings *settings, FILE *out) {
    cpa_settings_print(settings, "fp16 for once", out);
}

/* Makes one space of all that lies between words. */
static void join_lines(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++) {
        if (!isspace((unsigned char)*from)) {
            *to++ = *from;
        } else if (to > text && to[-1] != ' ') {
            *to++ = ' ';
        }
    }
    *to = 0;
}

/* Whether --help of a command lists the settings that have a meaning there, with their defaults; counts them. */
static void expect_help(const cpa_settings *command, int *listed) {
    const cpa_field *table = cpa_settings_rows;
    char *help = printed(cpa_settings_print_help, command);
    for (char *line = help; *line; line += strcspn(line, "\n") + 1) CPA_ASSERT_ORDER(strcspn(line, "\n"), <=, 100);
    join_lines(help);
    help = strstr(help, "turns a flag off."); /* behind the usage, which names some */
    CU_ASSERT_PTR_NOT_NULL_FATAL(help);
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char option[64], text[512];
        int shown = table[f].initial[0] && !cpa_setting_is_action(&table[f]);
        snprintf(option, sizeof option, " --%s ", table[f].name);
        char *row = strstr(help, option);
        CU_ASSERT_EQUAL(row != NULL, cpa_setting_is_of_command(command, &table[f]));
        if (!row) continue;
        listed[f]++;
        snprintf(text, sizeof text, shown ? "%s [%s]" : "%s", table[f].help, table[f].initial);
        CU_ASSERT_PTR_NOT_NULL(strstr(row, text));
    }
}

static void help_of_a_command_lists_its_settings_with_their_defaults(void) {
    int listed[CPA_SETTINGS_MAX] = {0};
    expect_help(&(cpa_settings){0}, listed);
    expect_help(&(cpa_settings){.serve = 1}, listed);
    expect_help(&(cpa_settings){.generate = 1}, listed);
    for (int f = 0; f < cpa_settings_n_rows; f++) CPA_ASSERT_ORDER(listed[f], >, 0);
    CU_ASSERT_EQUAL(listed[cpa_settings_index("block-size")], 3);
    CU_ASSERT_EQUAL(listed[cpa_settings_index("trace")], 1);
    CU_ASSERT_EQUAL(listed[cpa_settings_index("port")], 1);
}

/* Prompts are as long as a command line may be, and printed whole. */
static void long_texts_are_taken_whole(void) {
    enum { BYTES = 60000 };
    static char prompt[BYTES + 1];
    char *argv[] = {(char[]){"cp_attn"}, (char[]){"generate"}, (char[]){"--model-dir"},
                    (char[]){"m"},       (char[]){"--prompt"}, prompt};
    cpa_settings settings, again;
    cpa_error err;
    memset(prompt, 'a', BYTES);
    prompt[BYTES / 2] = '"';
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(6, argv, &settings, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(settings.prompt, prompt);
    CU_ASSERT_PTR_NULL(settings.prompt_ids);
    const char *row = strstr(printed(print_settings, &settings), "\nprompt: \"aaa");
    CU_ASSERT_PTR_NOT_NULL_FATAL(row);
    CU_ASSERT_EQUAL(strcspn(row + 1, " ") + 1 + strcspn(strchr(row, ' ') + 1, " "), 9 + BYTES + 2);
    cpa_settings_release(&settings);
    CU_ASSERT_PTR_NULL(settings.prompt);
    setenv("CPATTN_PROMPT", prompt, 1);
    CU_ASSERT_EQUAL_FATAL(load("generate --model-dir m --prompt b", &again, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(again.prompt, "b");
    cpa_settings_release(&again);
    unsetenv("CPATTN_PROMPT");
}

/* Deep and endless files are refused as soon as they are. */
static void what_a_settings_file_costs_is_bounded(void) {
    enum { BYTES = 3 << 20 };
    static char text[BYTES + 1];
    cpa_settings settings;
    cpa_error err;
    const clock_t begin = clock();
    memset(text, '[', BYTES);
    CU_ASSERT_EQUAL(load_file(text, "", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, ":1: found a list"));
    memset(text, '#', BYTES);
    CU_ASSERT_EQUAL(load_file(text, "", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "found more than 1048576 bytes"));
    CPA_ASSERT_ORDER(clock() - begin, <, 5 * CLOCKS_PER_SEC);
}

static void large_integers_keep_their_digits(void) {
    cpa_settings settings;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(load_file("seed: 9007199254740993\n", "", &settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(settings.seed, 9007199254740993);
    CU_ASSERT_PTR_NOT_NULL(strstr(printed(print_settings, &settings), "seed: 9007199254740993 "));
}

/* Whatever a text has in it, messages and the printed configuration keep it in one line, and YAML reads it back. */
static void a_line_stays_a_line(void) {
    cpa_settings settings, again;
    cpa_error err;
    CU_ASSERT_EQUAL(load_file("config: 1\n", "--config=a\nb\x1b[31m", &settings, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "a\\nb\\x1b[31m: found no readable file"));
    CU_ASSERT_EQUAL_FATAL(load("--trace=/a\n\"b\"\\\x1b[31m", &settings, &err), CPA_OK);
    char *text = printed(print_settings, &settings);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "trace: \"/a\\n\\\"b\\\"\\\\\\x1b[31m\" "));
    CU_ASSERT_EQUAL_FATAL(load_file(text, "", &again, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(again.trace, settings.trace);
}

static void the_printed_configuration_names_origins_and_can_be_read_again(void) {
    cpa_settings settings, again;
    cpa_error err;
    setenv("CPATTN_VERIFY", "0.3", 1);
    cpa_status status =
        load_file("block-size: 64\ntrace: /a b.jsonl\n", "--seed 7 --request-rate 2.5 --window 9", &settings, &err);
    unsetenv("CPATTN_VERIFY");
    CU_ASSERT_EQUAL_FATAL(status, CPA_OK);
    char *text = printed(print_settings, &settings);
    const char *lines[] = {"block-size: 64 ", "trace: \"/a b.jsonl\" ", "seed: 7 ",
                           "verify: 0.3 ",    "threads: auto ",         "# dtype: auto "};
    const char *origins[] = {":1\n",
                             ":2\n",
                             "# command line\n",
                             "# environment CPATTN_VERIFY\n",
                             "# default\n",
                             "# default; auto: fp16 for once\n"};
    for (int i = 0; i < 6; i++) {
        char *row = strstr(text, lines[i]);
        CU_ASSERT_PTR_NOT_NULL_FATAL(row);
        char *origin = strstr(row, origins[i]);
        CU_ASSERT_PTR_NOT_NULL_FATAL(origin);
        CPA_ASSERT_ORDER(strchr(row, '\n'), >=, origin);
    }
    CU_ASSERT_EQUAL_FATAL(load_file(text, "", &again, &err), CPA_OK);
    /* Everything up to the origins is equal. */
    const cpa_field *table = cpa_settings_rows;
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char before[CPA_TEXT_BYTES], after[CPA_TEXT_BYTES];
        if (cpa_setting_is_action(&table[f])) continue;
        cpa_field_format(&table[f], &settings, before, sizeof before);
        cpa_field_format(&table[f], &again, after, sizeof after);
        CU_ASSERT_STRING_EQUAL(before, after);
    }
}

static void paths_in_a_settings_file_are_relative_to_it(void) {
    cpa_settings settings;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(load("--config " CPA_CONFIGS "/service.yaml", &settings, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(settings.model, CPA_CONFIGS "/small.yaml");
    CU_ASSERT_EQUAL_FATAL(load("--config " CPA_CONFIGS "/service.yaml --model here.yaml", &settings, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(settings.model, "here.yaml");
}

static void the_shapes_under_configs_load(void) {
    cpa_model_file model;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_model_load(CPA_CONFIGS "/llama-3-8b.yaml", &model, &err), CPA_OK);
    CU_ASSERT_EQUAL(model.shape.layers, 32);
    CU_ASSERT_EQUAL(model.shape.attention.q_heads, 32);
    CU_ASSERT_EQUAL(model.shape.attention.kv_heads, 8);
    CU_ASSERT_EQUAL(model.shape.attention.v_dim, 128);
    CU_ASSERT_EQUAL(model.shape.attention.dtype, CPA_BF16);
    CU_ASSERT_EQUAL(model.shape.mask.causal, 1);
    CU_ASSERT_EQUAL_FATAL(cpa_model_load(CPA_CONFIGS "/llama-3-70b.yaml", &model, &err), CPA_OK);
    CU_ASSERT_EQUAL(model.shape.layers, 80);
    CU_ASSERT_EQUAL(model.shape.attention.q_heads, 64);
}

/* A head of 192 is attended where prompts are, a row of 576 where rows decode, both at the scale of the head. */
static void latents_have_a_form_of_prompts_and_one_of_decode(void) {
    cpa_model_file model;
    cpa_error err;
    char text[256];
    CU_ASSERT_EQUAL_FATAL(cpa_model_load(CPA_CONFIGS "/deepseek-v3.yaml", &model, &err), CPA_OK);
    cpa_model_set_forms(&model);
    const cpa_model_shape shape = cpa_model_shape_of(&model);
    CU_ASSERT(shape.attention.v_in_k == 1 && shape.attention.k_dim == 576 && shape.attention.v_dim == 512);
    CU_ASSERT_EQUAL_FATAL(shape.n_forms, 2);
    const cpa_row_form prefill = shape.forms[shape.prefill_form].widths, decode = shape.forms[shape.decode_form].widths;
    CU_ASSERT(prefill.expanded == 1 && prefill.k_dim == 192 && prefill.v_dim == 128);
    CU_ASSERT(decode.expanded == 0 && decode.k_dim == 0 && decode.v_dim == 0);
    for (int32_t form = 0; form < 2; form++)
        CU_ASSERT_EQUAL(cpa_model_form_scale(&shape, form, shape.layers - 1), 0.1352f);
    cpa_model_describe(&model, text, sizeof text);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "128 query and 1 KV heads of 576 (latents of 512; prompts 192)"));
    CU_ASSERT_EQUAL(cpa_model_cut_layers(&model, 4, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_model_shape_of(&model).layers, 4);
    CU_ASSERT_EQUAL(cpa_model_cut_layers(&model, 5, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "--layers: found 5, expected at most the 4 of deepseek-v3"));
}

static void the_built_in_shape_is_that_of_small_yaml(void) {
    cpa_model_file read, small;
    cpa_model_small(&small);
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_model_load(CPA_CONFIGS "/small.yaml", &read, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(read.name, small.name);
    CU_ASSERT_EQUAL(read.shape.layers, small.shape.layers);
    CU_ASSERT_EQUAL(read.shape.attention.q_heads, small.shape.attention.q_heads);
    CU_ASSERT_EQUAL(read.shape.attention.kv_heads, small.shape.attention.kv_heads);
    CU_ASSERT_EQUAL(read.shape.attention.k_dim, small.shape.attention.k_dim);
    CU_ASSERT_EQUAL(read.shape.attention.v_dim, small.shape.attention.v_dim);
    CU_ASSERT_EQUAL(read.shape.attention.dtype, small.shape.attention.dtype);
    CU_ASSERT_EQUAL(read.shape.mask.causal, small.shape.mask.causal);
    CU_ASSERT_EQUAL(read.shape.mask.window, small.shape.mask.window);
    CU_ASSERT_EQUAL(read.shape.mask.sinks, small.shape.mask.sinks);
}

static void window_pattern_repeats_over_the_layers(void) {
    cpa_model_file model;
    cpa_error err;
    char *name = write_file(
        "layers: 5\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\nsinks: 3\n"
        "layer_windows: 4096 0\n");
    CU_ASSERT_EQUAL_FATAL(cpa_model_load(name, &model, &err), CPA_OK);
    cpa_model_shape shape = cpa_model_shape_of(&model);
    for (int32_t layer = 0; layer < 5; layer++) {
        cpa_mask mask = cpa_model_mask(&shape, layer);
        CU_ASSERT_EQUAL(mask.window, layer % 2 ? 0 : 4096);
        CU_ASSERT(mask.causal == 1 && mask.sinks == 3);
    }
    cpa_model_set_sinks(&model, 9);
    CU_ASSERT_EQUAL(cpa_model_mask(&shape, 4).sinks, 9);
    cpa_model_set_window(&model, 17);
    shape = cpa_model_shape_of(&model);
    CU_ASSERT_EQUAL(cpa_model_mask(&shape, 1).window, 17);
    unlink(name);
}

static void an_impossible_shape_is_refused_with_its_line(void) {
    static const char *const cases[][2] = {
        {"layers: 2\nq_heads: 7\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\n",
         ":2: q_heads: found 7, expected a multiple of kv_heads (2)"},
        {"layers: 0\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\n", ":1: layers: found '0'"},
        {"layers: 2\nq_heads: 8\nkv_heads: -2\nhead_dim: 64\ndtype: fp32\n", ":3: kv_heads: found '-2'"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 577\ndtype: fp32\n",
         ":4: head_dim: found '577', expected an integer from 1 to 576"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\ndtype: int4\n", ":5: dtype: found 'int4'"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\n", "found no key 'dtype'"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\nlayer_windows: 5 x\n",
         ":6: layer_windows: found 'x'"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\nlayer_windows: 5 0 7\n",
         ":6: layer_windows: found '7', expected at most 2"},
        {"layers: 2\nq_heads: 8\nkv_heads: 2\nhead_dim: 64\nlatent_dim: 32\nrope_dim: 16\ndtype: fp32\n",
         ":5: latent_dim: found 32 with rope_dim 16, head_dim 64 and 2 kv_heads, expected at most 576 of both"},
        {"layers: 2\nq_heads: 8\nkv_heads: 1\nhead_dim: 64\nrope_dim: 16\ndtype: fp32\n",
         ":5: rope_dim: found without latent_dim"},
        {"layers: 2\nheads: 8\n", ":2: found unknown key 'heads'"},
        {"", ":1: found no key 'layers'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpa_model_file model;
        cpa_error err;
        char *name = write_file(cases[i][0]);
        CU_ASSERT_EQUAL(cpa_model_load(name, &model, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i][1]));
        if (!strstr(err.message, cases[i][1])) printf("%s -> %s\n", cases[i][0], err.message);
        unlink(name);
    }
}

static void secrets_are_not_for_other_ranks(void) {
    static const char *const lines[] = {"serve --api-key hush --block-size 32", "--cache-salt hush --block-size 32"};
    for (int line = 0; line < 2; line++) {
        cpa_settings settings;
        cpa_error err;
        CU_ASSERT_EQUAL(load(lines[line], &settings, &err), CPA_OK);
        cpa_settings_hide_secrets(&settings);
        for (size_t i = 0; i + 4 <= sizeof settings; i++) {
            if (memcmp((const char *)&settings + i, "hush", 4) == 0) CU_FAIL("a secret is left");
        }
        CU_ASSERT_EQUAL(settings.block_size, 32);
    }
}

static const cpa_test tests[] = {
    {"command line goes over environment over file over default",
     command_line_goes_over_environment_over_file_over_default},
    {"every form of an option is read", every_form_of_an_option_is_read},
    {"formats are known by the names that others have for them", formats_are_known_by_the_names_of_others},
    {"bounds of every setting are kept", bounds_of_every_setting_are_kept},
    {"a bad command line is refused in one line", a_bad_command_line_is_refused_in_one_line},
    {"an alias is as good as the name", an_alias_is_as_good_as_the_name},
    {"a bad settings file is refused with its line", a_bad_settings_file_is_refused_with_its_line},
    {"the environment is checked like the command line", the_environment_is_checked_like_the_command_line},
    {"who drafts is read in one setting", who_drafts_is_read_in_one_setting},
    {"help of a command lists its settings with their defaults",
     help_of_a_command_lists_its_settings_with_their_defaults},
    {"long texts are taken whole", long_texts_are_taken_whole},
    {"the printed configuration names origins and can be read again",
     the_printed_configuration_names_origins_and_can_be_read_again},
    {"what a settings file costs is bounded", what_a_settings_file_costs_is_bounded},
    {"secrets are not for other ranks", secrets_are_not_for_other_ranks},
    {"large integers keep their digits", large_integers_keep_their_digits},
    {"a line stays a line", a_line_stays_a_line},
    {"paths in a settings file are relative to it", paths_in_a_settings_file_are_relative_to_it},
    {"the shapes under configs load", the_shapes_under_configs_load},
    {"latents have a form of prompts and one of decode", latents_have_a_form_of_prompts_and_one_of_decode},
    {"the built-in shape is that of small.yaml", the_built_in_shape_is_that_of_small_yaml},
    {"a window pattern repeats over the layers", window_pattern_repeats_over_the_layers},
    {"an impossible shape is refused with its line", an_impossible_shape_is_refused_with_its_line},
};
CPA_TEST_MAIN("settings", tests)
