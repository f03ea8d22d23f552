/* The results of a run as a JSON file, with vLLM's keys. */
#ifndef CPA_LAUNCHER_RESULT_JSON_H
#define CPA_LAUNCHER_RESULT_JSON_H

#include "launcher/report.h"

/* Checks before a run that a file can be written at `path`. CPA_INVALID, naming it, if not. */
cpa_status cpa_result_json_check(const char *path, cpa_error *err);

/* Writes the file beside its place and renames it, so that there is never a part of one. */
cpa_status cpa_result_json_write(const char *path, const cpa_outcome *outcome, cpa_error *err);

#endif
