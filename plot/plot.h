/* `cp_attn plot`: pictures of what runs and benchmarks have written. */
#ifndef CPA_PLOT_PLOT_H
#define CPA_PLOT_PLOT_H

/* argv[0] is "plot". Returns the exit code. */
int cpa_plot_main(int argc, char **argv);

#endif
