/* What rank 0 decides before a run, from the command line, the environment and the files, and tells every rank. */
#ifndef CPA_LAUNCHER_JOB_H
#define CPA_LAUNCHER_JOB_H

#include "launcher/generate/generate.h"
#include "launcher/settings/model_file.h"
#include "launcher/settings/settings.h"
#include "program/exit_code.h"
#include "program/placement.h"
#include "program/workload.h"
#include "src/llm/length_limits.h"
#include "src/model/transformer.h"

/* Plain memory: rank 0 broadcasts it. */
typedef struct cpa_job {
    int run; /* 0: nothing to run; end with `code` */
    cpa_exit_code code;
    cpa_settings settings;
    cpa_model_file model;     /* the model, with the dtypes, the cache and the mask of the settings */
    int has_network;          /* --model-dir */
    cpa_model_config network; /* the config of --model-dir */
    int64_t kept_logits;      /* tokens whose logits are kept for the end of the run */
    int32_t interleave;
    int32_t ranks;
} cpa_job;

/* Rank 0: reads everything that a run needs. --help, --version and --print-config are answered here. Whatever is wrong
 * is said in one line on stderr. `workload` is filled if there is something to run, unless that is the mixed run, and
 * `prompt_answer` for `generate`, where it outlives the workload. */
void cpa_job_prepare(int argc, char **argv, int32_t ranks, cpa_job *job, cpa_workload *workload,
                     cpa_prompt_answer *prompt_answer);

/* The requests that settings ask for, and whether they leave the choice of them to the program. */
cpa_workload_options cpa_job_workload_options(const cpa_settings *settings);
int cpa_job_is_mixed(const cpa_settings *settings);

/* With a network: what it is created with. */
cpa_transformer_options cpa_job_transformer_options(const cpa_job *job);

/* CPA_NO_MEMORY, with the numbers, if the network does not fit the memory of a rank. */
cpa_status cpa_job_check_memory(const cpa_job *job, int64_t memory_bytes, cpa_error *err);

/* What limits the cache of a rank in this job: the network takes its part of the memory, and something is left to
 * spare, on devices that serve what --gpu-memory-utilization says. */
cpa_cache_limits cpa_job_cache_limits(const cpa_job *job, int32_t cp_size, int64_t memory_bytes);

/* Sequences whose windows the cache holds: as --window-seqs says, or all that can run at once, of so many requests (0:
 * any number). */
int32_t cpa_job_window_seqs(const cpa_job *job, int64_t requests);
/* The size of a rank's cache: as --num-blocks and --window-seqs say, or enough for the workload. */
cpa_status cpa_job_cache_size(const cpa_job *job, const cpa_cache_limits *limits, const cpa_workload *workload,
                              cpa_cache_size *out, cpa_error *err);

/* What the settings of a server ask of its lengths. */
cpa_length_wishes cpa_job_length_wishes(const cpa_job *job);

/* Puts the option of the program in front of a message of the library that names an engine's option. */
void cpa_job_name_option(cpa_error *err);

/* The engine's options; those of the device are the caller's. */
cpa_engine_options cpa_job_engine_options(const cpa_job *job, cpa_cache_size cache, const cpa_workload *workload);

/* Makes the rules and forms of the model those of the settings; again where a job has been copied to, as they point into it. */
cpa_status cpa_job_set_rules(cpa_job *job, cpa_error *err);

#endif
