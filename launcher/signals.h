/* SIGINT and SIGTERM end a run after the step in flight. */
#ifndef CPA_LAUNCHER_SIGNALS_H
#define CPA_LAUNCHER_SIGNALS_H

#include <cpattn/engine.h>

/* From here on the first signal is kept for later; a second one ends the process as usual. */
void cpa_signals_install(void);

/* The engine that a signal stops; NULL: none. */
void cpa_signals_watch(cpa_engine *engine);

/* The signal that has come, or 0. */
int cpa_signals_received(void);

#endif
