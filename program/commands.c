#include "program/commands.h"

#include <stdarg.h>
#include <string.h>

/* In the order of cpa_command. */
static const struct {
    const char *words[2];
    int on_ranks; /* not 0: mpirun starts it */
    const char *arguments, *about;
} rows[CPA_COMMANDS] = {
    {{NULL}, 1, "[options]", "run requests on N ranks; without options, a mixed run"},
    {{"serve"}, 1, "[--model-dir DIR] [options]", "serve requests over HTTP"},
    {{"generate"}, 1, "--model-dir DIR --prompt TEXT [options]", "answer a prompt"},
    {{"bench"}, 1, "...", "measure one operation"},
    {{"bench", "serve"}, 0, "--url URL ...", "measure a server"},
    {{"plot"}, 0, "FILE...", "draw results and timelines"},
    {{"check"}, 0, "FILE...", "compute rows of --violation-dump again"},
};

/* How many words the command has, if they are those behind the program's name; else -1. */
static int matches(cpa_command command, int argc, char *const *argv) {
    int n = 0;
    while (n < 2 && rows[command].words[n]) {
        if (n + 1 >= argc || strcmp(argv[n + 1], rows[command].words[n]) != 0) return -1;
        n++;
    }
    return n;
}

cpa_command cpa_command_of(int argc, char *const *argv) {
    cpa_command best = CPA_COMMAND_RUN;
    int most = 0;
    for (int c = 0; c < CPA_COMMANDS; c++) {
        const int words = matches((cpa_command)c, argc, argv);
        if (words <= most) continue;
        most = words;
        best = (cpa_command)c;
    }
    return best;
}

/* Adds to a text of which `used` bytes are there; returns how many are then, as if there were room for all. */
__attribute__((format(printf, 4, 5))) static size_t add(char *out, size_t size, size_t used, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(used < size ? out + used : NULL, used < size ? size - used : 0, format, args);
    va_end(args);
    return used + (n > 0 ? (size_t)n : 0);
}

void cpa_command_print_usage(cpa_command command, const char *lead, FILE *out) {
    fprintf(out, "%s%scp_attn", lead, rows[command].on_ranks ? "mpirun -np N " : "");
    for (int w = 0; w < 2 && rows[command].words[w]; w++) fprintf(out, " %s", rows[command].words[w]);
    fprintf(out, " %s    %s\n", rows[command].arguments, rows[command].about);
}

const char *cpa_commands_list(const char *quote, char *out, size_t size) {
    size_t used = 0;
    int last = CPA_COMMANDS - 1;
    out[0] = 0;
    while (rows[last].words[1]) last--;
    for (int c = 0; c <= last; c++) {
        if (!rows[c].words[0] || rows[c].words[1]) continue;
        used = add(out, size, used, "%s%s%s%s",
                   used == 0   ? ""
                   : c == last ? " or "
                               : ", ",
                   quote, rows[c].words[0], quote);
    }
    return out;
}

/* Whether a shell takes it as it stands. */
static int is_plain(const char *word) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+,-./:=@_";
    return word[0] && strspn(word, plain) == strlen(word);
}

const char *cpa_command_line(int ranks, int argc, char *const *argv, char *out, size_t size) {
    size_t used = add(out, size, 0, "mpirun -np %d cp_attn", ranks);
    for (int i = 0; i < argc; i++) {
        if (is_plain(argv[i])) {
            used = add(out, size, used, " %s", argv[i]);
            continue;
        }
        used = add(out, size, used, " '");
        for (const char *c = argv[i]; *c; c++)
            used = *c == '\'' ? add(out, size, used, "'\\''") : add(out, size, used, "%c", *c);
        used = add(out, size, used, "'");
    }
    return out;
}
