/* `cp_attn check FILE...`: rows that a run has kept (--violation-dump), computed again alone. */
#ifndef CPA_LAUNCHER_ROW_CHECK_H
#define CPA_LAUNCHER_ROW_CHECK_H

/* Prints what each row is by the float64 reference and by attend with each instruction set of this CPU, and which keys
 * explain the result, over the files argv[1] and on. The exit code: 0 if every result is right, 1 if one is wrong, 2 for
 * a file that is no such row. */
int cpa_row_check_main(int argc, char **argv);

#endif
