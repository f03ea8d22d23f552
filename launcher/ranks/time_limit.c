#include "launcher/ranks/time_limit.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

/* The time runs in so many parts. A process that is stopped gets one signal for all that pass meanwhile. */
enum { PARTS = 8 };

static struct {
    volatile sig_atomic_t parts_left;
    cpa_exit_code code;
    char line[512]; /* "": nothing is to be said */
} limit;

static void on_alarm(int number) {
    (void)number;
    if (--limit.parts_left > 0) return;
    (void)!write(STDERR_FILENO, limit.line, strlen(limit.line));
    _exit((int)limit.code);
}

/* A signal after each part; 0: none. */
static void set_timer(double part_s) {
    const struct timeval part = {.tv_sec = (time_t)part_s, .tv_usec = (suseconds_t)(fmod(part_s, 1) * 1e6)};
    const struct itimerval timer = {.it_interval = part, .it_value = part};
    setitimer(ITIMER_REAL, &timer, NULL);
}

void cpa_time_limit_set(double seconds, cpa_exit_code code, const char *line) {
    enum { MOST = sizeof limit.line - sizeof "cp_attn: \n" };
    sigset_t alarm_only;
    const struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    set_timer(0);
    limit.line[0] = 0;
    if (line) snprintf(limit.line, sizeof limit.line, "cp_attn: %.*s\n", (int)MOST, line);
    limit.code = code;
    limit.parts_left = PARTS;
    sigaction(SIGALRM, &action, NULL);
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
    set_timer(seconds / PARTS);
}

void cpa_time_limit_clear(void) {
    set_timer(0);
}
