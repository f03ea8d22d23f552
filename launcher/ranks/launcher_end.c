#include "launcher/ranks/launcher_end.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "program/parent.h"

/* Whether Open MPI has started ranks on other hosts too. */
static int has_other_hosts(void) {
    const char *all = getenv("OMPI_COMM_WORLD_SIZE"), *here = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    return all && here && strcmp(all, here) != 0;
}

/* In a process that has only this thread: what it calls is safe there. Neither the group of this rank, which is killed
 * with it, nor its pipes, which are read until nobody has them, are its own. */
static _Noreturn void kill_later(int process) {
    struct pollfd ended = {.fd = 0, .events = POLLIN};
    int n;
    setsid();
    if (fork() != 0) _exit(0);
    dup2(process, ended.fd);
    (void)syscall(SYS_close_range, 1, ~0U, 0);
    while ((n = poll(&ended, 1, 1000 * CPA_LAUNCHER_END_S)) < 0 && errno == EINTR) continue;
    if (n == 0) (void)syscall(SYS_pidfd_send_signal, ended.fd, SIGKILL, NULL, 0);
    _exit(0);
}

void cpa_launcher_end_later(void) {
    const pid_t parent = has_other_hosts() ? cpa_parent_of_mpi() : 0;
    const int process = parent > 0 ? (int)syscall(SYS_pidfd_open, parent, 0) : -1;
    if (process < 0) return;
    const pid_t child = fork();
    if (child == 0) kill_later(process);
    if (child > 0) (void)waitpid(child, NULL, 0);
    close(process);
}
