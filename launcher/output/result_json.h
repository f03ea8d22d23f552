/* The results of a run as a JSON file, with vLLM's keys. */
#ifndef CPA_LAUNCHER_RESULT_JSON_H
#define CPA_LAUNCHER_RESULT_JSON_H

#include "launcher/output/report.h"

/* Writes the file (program/output_file.h). CPA_IO, naming it, if that fails. */
cpa_status cpa_result_json_write(const char *path, const cpa_outcome *outcome, cpa_error *err);

#endif
