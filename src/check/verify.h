/* The sampled check: recomputes a share of the (token, head, layer) rows of each step in float64, from keys and values
 * gathered from all ranks, and compares what is in the cache with what the model gave.
 *
 * While the layers run, the owner of a sampled row keeps copies of its query and result. When the step is done, the
 * keys and values of each (chunk, layer, KV head) that has samples travel to one checking rank, in rounds of bounded
 * size, and that rank walks them in float64 (src/check/reference.h). Neither the rounds nor the kernels nor the merge
 * of context attention take part. */
#ifndef CPA_VERIFY_H
#define CPA_VERIFY_H

#include "comm/comm.h"
#include "src/worker/worker.h"

typedef struct cpa_verify cpa_verify;

typedef struct cpa_verify_stats {
    uint64_t rows;       /* rows checked on this rank */
    uint64_t violations; /* violations found on this rank */
    uint64_t undecided;  /* checked rows that nobody can judge, as scores may overflow (check/reference.h) */
    double max_error;
    double seconds; /* time of the check on this rank, s */
    /* Of checked rows that attend a list of keys: how many there are, and the shares of their softmax that lie on keys
     * which the mask shows but the list lacks, their sum and the largest. */
    uint64_t listed_rows;
    double left_out, most_left_out;
} cpa_verify_stats;

/* `rate` is the share of rows that is checked, CPA_VERIFY_AUTO what a small share of the run time pays for
 * (src/check/verify_budget.h). At least one row of the first step is checked, and of every 64th after it (with
 * CPA_VERIFY_AUTO: if its keys can be paid for). The reference runs on as many threads as `device` says, one without
 * it. `worker` and `control` must outlive the check. */
cpa_status cpa_verify_create(cpa_control *control, cpa_worker *worker, double rate, uint64_t seed,
                             const cpa_device_options *device, cpa_verify **out, cpa_error *err);
void cpa_verify_destroy(cpa_verify *verify);
/* The rank that finds a wrong row keeps what it had in a file of this folder (src/check/cases/row_file.h), and the
 * message says how it is computed again; but for rows of a form with a matrix, which such a file does not hold. NULL:
 * nothing is kept, and the message says so. */
cpa_status cpa_verify_keep_violations(cpa_verify *verify, const char *folder, cpa_error *err);

/* Pass this to cpa_worker_prepare and cpa_worker_run, and then call cpa_verify_step with the same plan. */
cpa_worker_observer cpa_verify_observer(cpa_verify *verify);

void cpa_verify_get_stats(const cpa_verify *verify, cpa_verify_stats *out);

#endif
