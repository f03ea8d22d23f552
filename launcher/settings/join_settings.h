/* What a rank has to know before it meets the others. Each reads it from its own command line and environment; all else
 * is read by rank 0 (settings.h), which knows the names of these too. */
#ifndef CPA_LAUNCHER_JOIN_SETTINGS_H
#define CPA_LAUNCHER_JOIN_SETTINGS_H

#include <cpattn/status.h>

enum { CPA_JOB_SECRET_BYTES = 256 };

typedef struct cpa_join_settings {
    char secret[CPA_JOB_SECRET_BYTES]; /* secret of the job; "" = none */
    double timeout_s;                  /* how long all ranks may take to come */
} cpa_join_settings;

/* --job-secret-file or CPATTN_JOB_SECRET_FILE, else CPATTN_JOB_SECRET, which is taken out of the environment; and
 * --join-timeout. Otherwise CPA_INVALID and one line. */
cpa_status cpa_join_settings_load(int argc, char **argv, cpa_join_settings *out, cpa_error *err);

#endif
