/* Templates as programs that nobody has read: what they may not do, and what becomes of the process that runs them. */
#include "src/text/jinja.h"

#include <ctype.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/fixtures/unit.h"

static const cpa_jinja_limits LIMITS = {.seconds = 10, .memory = (int64_t)512 << 20};
static const cpa_jinja_limits SHORT = {.seconds = 1, .memory = (int64_t)512 << 20};

static cpa_status open_source(const char *source, const cpa_jinja_limits *limits, cpa_jinja **out, cpa_error *err) {
    json_t *templates = json_pack("{s:s}", "default", source), *tokens = json_object();
    const cpa_status status = cpa_jinja_open(templates, tokens, limits, out, err);
    json_decref(templates);
    json_decref(tokens);
    return status;
}

static cpa_jinja *open_within(const char *source, const cpa_jinja_limits *limits) {
    cpa_jinja *jinja = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(open_source(source, limits, &jinja, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(jinja);
    return jinja;
}

static cpa_jinja *open_well(const char *source) {
    return open_within(source, &LIMITS);
}

/* Asks for the text of one question; the status, with the text or the reason in `said`. */
static cpa_status say(cpa_jinja *jinja, const char *question, char said[512]) {
    json_t *chat =
        json_pack("{s:[{s:s,s:s}],s:n,s:n,s:n,s:b,s:b,s:i}", "messages", "role", "user", "content", question, "tools",
                  "documents", "kwargs", "add_generation_prompt", 1, "continue_final_message", 0, "now", 0);
    cpa_bytes text = {.count = 0};
    cpa_error err = {CPA_OK, ""};
    const cpa_status status = cpa_jinja_render(jinja, chat, &text, &err);
    snprintf(said, 512, "%.*s", status == CPA_OK ? (int)text.count : 511, status == CPA_OK ? text.data : err.message);
    cpa_bytes_release(&text);
    json_decref(chat);
    return status;
}

static void check_said(cpa_jinja *jinja, const char *question, cpa_status status, const char *expected) {
    char said[512];
    CU_ASSERT_EQUAL(say(jinja, question, said), status);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, expected));
    if (!strstr(said, expected)) fprintf(stderr, "found \"%s\", expected \"%s\"\n", said, expected);
}

/* The child of this process; 0 if there is none. Only one is open at a time. */
static pid_t child(void) {
    char path[64], line[256];
    pid_t found = 0;
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes && (entry = readdir(processes));) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        snprintf(path, sizeof path, "/proc/%.16s/stat", entry->d_name);
        FILE *file = fopen(path, "r");
        const char *behind = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
        int parent = 0;
        char state = 'Z';
        if (behind && sscanf(behind + 1, " %c %d", &state, &parent) == 2 && parent == getpid() && state != 'Z')
            found = atoi(entry->d_name);
        if (file) fclose(file);
    }
    closedir(processes);
    return found;
}

static const char PLAIN[] = "{{ messages[0].content }}!";

static void a_child_that_was_killed_is_replaced(void) {
    cpa_jinja *jinja = open_well(PLAIN);
    check_said(jinja, "one", CPA_OK, "one!");
    const pid_t first = child();
    CU_ASSERT_FATAL(first > 0);
    CU_ASSERT_EQUAL(kill(first, SIGKILL), 0);
    while (child() == first) usleep(1000);
    check_said(jinja, "two", CPA_OK, "two!");
    CU_ASSERT(child() > 0 && child() != first);
    cpa_jinja_close(jinja);
    CU_ASSERT_EQUAL(child(), 0);
}

static void a_template_without_an_end_is_stopped_in_time(void) {
    cpa_jinja *jinja = open_within(
        "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}!",
        &SHORT);
    for (int i = 0; i < 2; i++) {
        const double begin = cpa_clock_now();
        check_said(jinja, "loop", CPA_INVALID, "it takes more than 1 s");
        const double took = cpa_clock_now() - begin;
        CU_ASSERT(took >= 0.9 && took < 10);
        CU_ASSERT_EQUAL(child(), 0);
        check_said(jinja, "on", CPA_OK, "on!");
    }
    cpa_jinja_close(jinja);
    cpa_error err = {CPA_OK, ""};
    jinja = NULL;
    CU_ASSERT_EQUAL(open_source("{{ 10 ** (10 ** 9) }}", &SHORT, &jinja, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "it takes more than 1 s"));
    CU_ASSERT_PTR_NULL(jinja);
}

/* A process whose parent has gone in the middle of a template, and cannot kill it any more, ends by its own limit. */
static void it_ends_without_its_parent(void) {
    cpa_jinja *jinja = open_well(PLAIN);
    char path[64], line[256];
    char soft[32] = "";
    check_said(jinja, "a", CPA_OK, "a!");
    snprintf(path, sizeof path, "/proc/%d/limits", (int)child());
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) (void)sscanf(line, "Max cpu time %31s", soft);
    if (file) fclose(file);
    CU_ASSERT(atoi(soft) >= 10 && atoi(soft) < 20);
    cpa_jinja_close(jinja);
}

/* One template of many: which it is the question says. */
static cpa_jinja *open_many(const char *const *sources, size_t n, const cpa_jinja_limits *limits) {
    char all[8192] = "";
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += (size_t)snprintf(all + bytes, sizeof all - bytes,
                                  "{%% if messages[0].content == '%zu' %%}%s{%% endif %%}", i, sources[i]);
    CU_ASSERT_FATAL(bytes < sizeof all);
    return open_within(all, limits);
}

static void what_takes_too_much_memory_is_refused(void) {
    static const char *const sources[] = {
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages[0].role * (messages | length * 10 ** 10) }}",
        "{{ '%10000000000d' | format(7) }}",
        "{% set ns = namespace(x='abcdefgh') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ [1] * 10 ** 9 }}",
        "{% for i in range(10 ** 10) %}{% endfor %}",
    };
    const size_t n = sizeof sources / sizeof *sources;
    const cpa_jinja_limits limits = {.seconds = 10, .memory = (int64_t)128 << 20};
    cpa_jinja *jinja = open_many(sources, n, &limits);
    char question[8];
    for (size_t i = 0; i < n; i++) {
        snprintf(question, sizeof question, "%zu", i);
        check_said(jinja, question, CPA_INVALID, i + 1 < n ? "it takes too much memory" : "Range too big");
        check_said(jinja, "other", CPA_OK, "");
    }
    cpa_jinja_close(jinja);
}

static void a_template_stays_in_its_sandbox(void) {
    static const char *const sources[] = {
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ raise_exception.__globals__['os'].getpid() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__.__init__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ ('{0.__class__' ~ '.__mro__}').format_map({'0': messages}) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% set x = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getpid() }}",
        "{{ open('/etc/passwd') }}",
        "{{ __import__('os') }}",
    };
    const size_t n = sizeof sources / sizeof *sources;
    cpa_jinja *jinja = open_many(sources, n, &LIMITS);
    char question[8], said[512];
    for (size_t i = 0; i < n; i++) {
        snprintf(question, sizeof question, "%zu", i);
        const int is_refused = say(jinja, question, said) == CPA_INVALID;
        CU_ASSERT(is_refused || !said[0]); /* what is not there is no text */
        if (!is_refused && said[0]) fprintf(stderr, "%s: %s\n", sources[i], said);
    }
    cpa_jinja_close(jinja);
}

/* What it could still do outside of the sandbox: no more than to read and write what is open. */
static void the_process_has_given_up_what_it_does_not_need(void) {
    setenv("CPATTN_API_KEY", "secret", 1);
    cpa_jinja *jinja = open_well(PLAIN);
    char path[64], link[64], line[256], environment[4096] = "";
    int descriptors = 0, filtered = 0;
    const int pid = child();
    CU_ASSERT_FATAL(pid > 0);
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) descriptors += entry->d_name[0] != '.';
    closedir(folder);
    CU_ASSERT_EQUAL(descriptors, 3);
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) filtered |= strncmp(line, "Seccomp:\t2", 10) == 0;
    if (file) fclose(file);
#if defined(__x86_64__) || defined(__aarch64__)
    CU_ASSERT(filtered);
#endif
    snprintf(path, sizeof path, "/proc/%d/cwd", pid);
    const ssize_t n = readlink(path, link, sizeof link);
    CU_ASSERT(n == 1 && link[0] == '/');
    snprintf(path, sizeof path, "/proc/%d/environ", pid);
    file = fopen(path, "r");
    const size_t bytes = file ? fread(environment, 1, sizeof environment, file) : 0;
    if (file) fclose(file);
    CU_ASSERT(bytes > 0 && !memmem(environment, bytes, "CPATTN", 6));
    cpa_jinja_close(jinja);
    unsetenv("CPATTN_API_KEY");
}

static void what_a_template_says_is_one_line(void) {
    cpa_jinja *jinja = open_well("{{ raise_exception('Not so,\nfriend: ' ~ messages[0].content) }}");
    check_said(jinja, "x\x1b", CPA_INVALID, "Not so,\\nfriend: x\\x1b");
    cpa_jinja_close(jinja);
    jinja = open_well("{{ raise_exception('y' * 100000) }}");
    check_said(jinja, "x", CPA_INVALID, "yyy");
    cpa_jinja_close(jinja);
    jinja = open_well("{{ '\\ud800' }}");
    check_said(jinja, "x", CPA_INVALID, "UnicodeEncodeError");
    cpa_jinja_close(jinja);
    jinja = open_well("{{ messages.nothing.more }}");
    check_said(jinja, "x", CPA_INVALID, "has no attribute 'nothing'");
    cpa_jinja_close(jinja);
}

static void without_python_or_jinja_there_is_a_line(void) {
    cpa_jinja_limits limits = LIMITS;
    cpa_jinja *jinja = NULL;
    cpa_error err = {CPA_OK, ""};
    limits.python = "/usr/bin/no-such-python3";
    CU_ASSERT_EQUAL(open_source(PLAIN, &limits, &jinja, &err), CPA_UNSUPPORTED);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "the package python3 is needed for it: /usr/bin/no-such-python3: No such file or directory");
    limits.python = CPA_TEST_DATA "/python_without_jinja";
    CU_ASSERT_EQUAL(open_source(PLAIN, &limits, &jinja, &err), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "the package python3-jinja2 is needed for it: "));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "No module named 'jinja2'"));
    limits.python = "/bin/false";
    CU_ASSERT_EQUAL(open_source(PLAIN, &limits, &jinja, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "has ended"));
    CU_ASSERT_PTR_NULL(jinja);
}

/* ---- Several threads ---- */

typedef struct asker {
    cpa_jinja *jinja;
    int number, right;
} asker;

static void *ask(void *ctx) {
    asker *a = ctx;
    char question[32], expected[40], said[512];
    for (int i = 0; i < 50; i++) {
        snprintf(question, sizeof question, "%d of %d", i, a->number);
        snprintf(expected, sizeof expected, "%s!", question);
        a->right += say(a->jinja, question, said) == CPA_OK && strcmp(said, expected) == 0;
    }
    return NULL;
}

static void several_threads_may_ask(void) {
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    asker askers[THREADS];
    cpa_jinja *jinja = open_well(PLAIN);
    for (int i = 0; i < THREADS; i++) {
        askers[i] = (asker){jinja, i, 0};
        CU_ASSERT_EQUAL_FATAL(pthread_create(&threads[i], NULL, ask, &askers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CU_ASSERT_EQUAL(askers[i].right, 50);
    }
    cpa_jinja_close(jinja);
}

/* Longer than what a socket holds, there and back. */
static void long_chats_go_through(void) {
    enum { LONG = 24 << 20 };
    char *question = malloc(LONG + 1);
    cpa_jinja *jinja = NULL;
    cpa_bytes text = {.count = 0};
    CU_ASSERT_PTR_NOT_NULL_FATAL(question);
    memset(question, 'q', LONG);
    question[LONG] = 0;
    const cpa_jinja_limits limits = {.seconds = 60, .memory = (int64_t)1 << 30};
    CU_ASSERT_EQUAL_FATAL(open_source(PLAIN, &limits, &jinja, NULL), CPA_OK);
    json_t *chat =
        json_pack("{s:[{s:s,s:s}],s:n,s:n,s:n,s:b,s:b,s:i}", "messages", "role", "user", "content", question, "tools",
                  "documents", "kwargs", "add_generation_prompt", 1, "continue_final_message", 0, "now", 0);
    CU_ASSERT_EQUAL(cpa_jinja_render(jinja, chat, &text, NULL), CPA_OK);
    CU_ASSERT_EQUAL(text.count, LONG + 1);
    CU_ASSERT(text.count == LONG + 1 && memcmp(text.data, question, LONG) == 0 && text.data[LONG] == '!');
    cpa_bytes_release(&text);
    json_decref(chat);
    cpa_jinja_close(jinja);
    free(question);
}

static const cpa_test TESTS[] = {
    {"a child that was killed is replaced", a_child_that_was_killed_is_replaced},
    {"a template without an end is stopped in time", a_template_without_an_end_is_stopped_in_time},
    {"it ends without its parent", it_ends_without_its_parent},
    {"what takes too much memory is refused", what_takes_too_much_memory_is_refused},
    {"a template stays in its sandbox", a_template_stays_in_its_sandbox},
    {"the process has given up what it does not need", the_process_has_given_up_what_it_does_not_need},
    {"what a template says is one line", what_a_template_says_is_one_line},
    {"without Python or Jinja there is a line", without_python_or_jinja_there_is_a_line},
    {"several threads may ask", several_threads_may_ask},
    {"long chats go through", long_chats_go_through},
};
CPA_TEST_MAIN("Jinja", TESTS)
