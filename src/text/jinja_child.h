/* The process that runs templates of Jinja: jinja_child.py, with the packages python3 and python3-jinja2. It has no
 * descriptor but one end of a socket, no files, no network and bounded memory, and is talked to in frames. One thread at
 * a time. */
#ifndef CPA_TEXT_JINJA_CHILD_H
#define CPA_TEXT_JINJA_CHILD_H

#include <sys/types.h>

#include <cpattn/status.h>

#include "src/text/bytes.h"

/* One of zeros does not run. */
typedef struct cpa_jinja_child {
    pid_t pid; /* 0: it does not run */
    int fd;
} cpa_jinja_child;

/* Starts an interpreter, looked for in PATH unless its name has a slash. CPA_UNSUPPORTED, with the package that is
 * missing, if there is none or it lacks Jinja; CPA_IO if no process can be made. */
cpa_status cpa_jinja_child_start(const char *python, cpa_jinja_child *out, cpa_error *err);

/* Whether it runs still. If not, it is as if never started. */
int cpa_jinja_child_runs(cpa_jinja_child *child);

/* Sends a frame and adds the text of its answer to *out. CPA_INVALID with the child's reason if it has none to give, or
 * has none in so many seconds; CPA_IO if the process ends before. Where it has not answered,
 * or has run out of memory, it is killed. */
cpa_status cpa_jinja_child_ask(cpa_jinja_child *child, const char *frame, size_t bytes, double seconds, cpa_bytes *out,
                               cpa_error *err);

/* Kills it, if it runs. */
void cpa_jinja_child_end(cpa_jinja_child *child);

#endif
