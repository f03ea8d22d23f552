#include "bench/serve/interrupt.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t received;

static void note(int number) {
    received = number;
}

void cpa_interrupt_install(void) {
    struct sigaction action = {.sa_handler = note, .sa_flags = SA_RESETHAND};
    received = 0;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

int cpa_interrupt_received(void) {
    return received;
}
