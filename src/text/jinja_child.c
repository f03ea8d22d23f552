#include "src/text/jinja_child.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "src/text/jinja_child_py.h"

enum { HEADER_BYTES = 8, MOST_ANSWER_BYTES = 1 << 28, START_S = 30 };

/* ---- Frames ---- */

/* Waits until the socket can be read from or written to. */
static int wait_for(const cpa_jinja_child *child, short events, double until) {
    for (;;) {
        const double left = until - cpa_clock_now();
        struct pollfd poll_fd = {.fd = child->fd, .events = events};
        const int n = left <= 0 ? 0 : poll(&poll_fd, 1, (int)(left * 1000) + 1);
        if (n < 0 && errno == EINTR) continue;
        return n > 0;
    }
}

static cpa_status fail_late(double seconds, cpa_error *err) {
    return cpa_fail(err, CPA_INVALID, "it takes more than %g s", seconds);
}

static cpa_status fail_ended(cpa_error *err) {
    return cpa_fail(err, CPA_IO, "the process that renders it has ended");
}

static cpa_status send_all(const cpa_jinja_child *child, const char *data, size_t bytes, double seconds, double until,
                           cpa_error *err) {
    while (bytes > 0) {
        if (!wait_for(child, POLLOUT, until)) return fail_late(seconds, err);
        const ssize_t n = send(child->fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n < 0) return fail_ended(err);
        data += n, bytes -= (size_t)n;
    }
    return CPA_OK;
}

static cpa_status receive_all(const cpa_jinja_child *child, char *data, size_t bytes, double seconds, double until,
                              cpa_error *err) {
    while (bytes > 0) {
        if (!wait_for(child, POLLIN, until)) return fail_late(seconds, err);
        const ssize_t n = recv(child->fd, data, bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return fail_ended(err);
        data += n, bytes -= (size_t)n;
    }
    return CPA_OK;
}

static cpa_status exchange(const cpa_jinja_child *child, const char *frame, size_t bytes, double seconds, double until,
                           cpa_bytes *out, cpa_error *err) {
    unsigned char header[HEADER_BYTES];
    uint64_t n = bytes;
    for (int i = 0; i < HEADER_BYTES; i++, n >>= 8) header[i] = (unsigned char)n;
    CPA_TRY(send_all(child, (const char *)header, sizeof header, seconds, until, err));
    CPA_TRY(send_all(child, frame, bytes, seconds, until, err));
    CPA_TRY(receive_all(child, (char *)header, sizeof header, seconds, until, err));
    for (int i = HEADER_BYTES; i-- > 0;) n = n << 8 | header[i];
    if (n == 0 || n > MOST_ANSWER_BYTES)
        return cpa_fail(err, CPA_INVALID, "it makes a text of %llu bytes, expected at most %d", (unsigned long long)n,
                        MOST_ANSWER_BYTES);
    if (!cpa_bytes_reserve(out, n)) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of a chat");
    CPA_TRY(receive_all(child, out->data + out->count, n, seconds, until, err));
    out->count += (int64_t)n;
    return CPA_OK;
}

cpa_status cpa_jinja_child_ask(cpa_jinja_child *child, const char *frame, size_t bytes, double seconds, cpa_bytes *out,
                               cpa_error *err) {
    cpa_bytes answer = {.count = 0};
    cpa_status status = exchange(child, frame, bytes, seconds, cpa_clock_now() + seconds, &answer, err);
    if (status != CPA_OK) {
        cpa_jinja_child_end(child);
    } else if (answer.data[0] != '=') {
        status = cpa_fail(err, CPA_INVALID, "%.*s", (int)answer.count - 1, answer.data + 1);
        if (answer.data[0] == '#') cpa_jinja_child_end(child); /* what is left of one without memory */
    } else if (!cpa_bytes_add(out, answer.data + 1, (size_t)answer.count - 1)) {
        status = cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of a chat");
    }
    cpa_bytes_release(&answer);
    return status;
}

/* ---- The process ---- */

/* Of the environment it has what an interpreter needs, and no secrets. */
static void keep(char *buffer, size_t bytes, const char *name, char **environment, int *n) {
    const char *value = getenv(name);
    if (!value || snprintf(buffer, bytes, "%s=%s", name, value) >= (int)bytes) return;
    environment[(*n)++] = buffer;
}

/* In a group of its own, so that signals of a terminal pass it by; it ends when the other end of its socket is gone. */
static int spawn(const char *python, int fd, pid_t *pid) {
    static char isolated[] = "-I", command[] = "-c";
    static char load[] = "import sys; exec(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), 'little')))";
    char *argv[] = {(char *)(uintptr_t)python, isolated, command, load, NULL};
    char path[4096], home[4096], zone[256], *environment[4] = {NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    int n = 0;
    keep(path, sizeof path, "PATH", environment, &n);
    keep(home, sizeof home, "HOME", environment, &n);
    keep(zone, sizeof zone, "TZ", environment, &n);
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&actions, fd, 0);
    posix_spawn_file_actions_adddup2(&actions, 0, 1);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    const int failed = posix_spawnp(pid, python, &actions, &attributes, argv, environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

cpa_status cpa_jinja_child_start(const char *python, cpa_jinja_child *out, cpa_error *err) {
    int ends[2];
    cpa_jinja_child child = {.pid = 0};
    cpa_error why = {CPA_OK, ""};
    cpa_bytes nothing = {.count = 0};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return cpa_fail(err, CPA_IO, "no socket for %s: %s", python, strerror(errno));
    child.fd = ends[0];
    const int failed = spawn(python, ends[1], &child.pid);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        return cpa_fail(err, failed == ENOENT || failed == EACCES ? CPA_UNSUPPORTED : CPA_IO,
                        "the package python3 is needed for it: %.100s: %s", python, strerror(failed));
    }
    const cpa_status status = cpa_jinja_child_ask(&child, (const char *)cpa_jinja_child_py, cpa_jinja_child_py_bytes,
                                                  START_S, &nothing, &why);
    cpa_bytes_release(&nothing);
    if (status == CPA_OK) {
        *out = child;
        return CPA_OK;
    }
    cpa_jinja_child_end(&child);
    return cpa_fail(err, status == CPA_INVALID ? CPA_UNSUPPORTED : status,
                    "the package python3-jinja2 is needed for it: %.100s: %.200s", python, why.message);
}

int cpa_jinja_child_runs(cpa_jinja_child *child) {
    struct pollfd poll_fd = {.fd = child->fd, .events = POLLIN};
    if (!child->pid) return 0;
    /* It says nothing by itself: what can be read is its end. */
    if (poll(&poll_fd, 1, 0) == 0) return 1;
    cpa_jinja_child_end(child);
    return 0;
}

void cpa_jinja_child_end(cpa_jinja_child *child) {
    if (!child->pid) return;
    kill(child->pid, SIGKILL);
    while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR) continue;
    close(child->fd);
    *child = (cpa_jinja_child){.pid = 0};
}
