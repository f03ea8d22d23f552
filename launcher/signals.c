#include "launcher/signals.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic(cpa_engine *) watched;
static volatile sig_atomic_t received;

static void on_signal(int number) {
    cpa_engine *engine = atomic_load(&watched);
    received = number;
    if (engine) cpa_engine_stop(engine);
}

void cpa_signals_install(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)(SA_RESTART | SA_RESETHAND)};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

void cpa_signals_watch(cpa_engine *engine) {
    atomic_store(&watched, engine);
}

int cpa_signals_received(void) {
    return received;
}
