/* SIGINT and SIGTERM of the client: noticed, so that what has been measured is still told. */
#ifndef CPA_BENCH_SERVE_INTERRUPT_H
#define CPA_BENCH_SERVE_INTERRUPT_H

/* From now on a signal is noticed, and a second one ends the program; writing to who has gone is an error alone. */
void cpa_interrupt_install(void);

/* The signal; 0: none. */
int cpa_interrupt_received(void);

#endif
