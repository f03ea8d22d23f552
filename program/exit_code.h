/* The exit codes of the program. */
#ifndef CPA_PROGRAM_EXIT_CODE_H
#define CPA_PROGRAM_EXIT_CODE_H

#include <cpattn/status.h>

typedef enum cpa_exit_code {
    CPA_EXIT_DONE = 0,
    CPA_EXIT_CHECK_FAILED = 1, /* or a request was lost */
    CPA_EXIT_BAD_INPUT = 2,    /* usage, configuration or input */
    CPA_EXIT_FAULT = 3,        /* at run time */
    CPA_EXIT_SIGNAL = 128      /* and the number of the signal that stopped the run */
} cpa_exit_code;

static inline cpa_exit_code cpa_exit_code_of(cpa_status status) {
    switch (status) {
        case CPA_OK: return CPA_EXIT_DONE;
        case CPA_CHECK_FAILED:
        case CPA_STOPPED: return CPA_EXIT_CHECK_FAILED;
        case CPA_INVALID:
        case CPA_UNSUPPORTED: return CPA_EXIT_BAD_INPUT;
        default: return CPA_EXIT_FAULT;
    }
}

#endif
