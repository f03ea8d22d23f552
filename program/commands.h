/* The commands of the program, told once: which one a command line is, and what usage and refusals say of them. */
#ifndef CPA_PROGRAM_COMMANDS_H
#define CPA_PROGRAM_COMMANDS_H

#include <stddef.h>
#include <stdio.h>

typedef enum cpa_command {
    CPA_COMMAND_RUN = 0, /* no word */
    CPA_COMMAND_SERVE,
    CPA_COMMAND_GENERATE,
    CPA_COMMAND_BENCH,
    CPA_COMMAND_BENCH_SERVE, /* a command of two words */
    CPA_COMMAND_PLOT,
    CPA_COMMAND_CHECK
} cpa_command;
enum { CPA_COMMANDS = CPA_COMMAND_CHECK + 1 };

/* The command of a line, whose first word is the program: that of the most words. Another word, as a wrong one, is one of
 * CPA_COMMAND_RUN. */
cpa_command cpa_command_of(int argc, char *const *argv);

/* Prints the line of a command's usage behind `lead`, such as "usage: ". */
void cpa_command_print_usage(cpa_command command, const char *lead, FILE *out);

/* The commands that stand alone behind the program's name, in quotation marks where `quote` is "'", such as "'serve',
 * 'plot' or 'check'". Returns `out`. */
const char *cpa_commands_list(const char *quote, char *out, size_t size);

/* The line by which somebody starts a command with these words on so many ranks; words that a shell would take apart are
 * quoted. Returns `out`. */
const char *cpa_command_line(int ranks, int argc, char *const *argv, char *out, size_t size);

#endif
