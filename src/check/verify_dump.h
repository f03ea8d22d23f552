/* Keeps what a wrong row had in a file (src/check/cases/row_file.h), while its keys go by in the diagnosis. */
#ifndef CPA_VERIFY_DUMP_H
#define CPA_VERIFY_DUMP_H

#include "src/check/cases/row_file.h"
#include "src/check/verify_diagnose.h"
#include "src/check/verify_internal.h"

typedef struct cpa_verify_dump {
    FILE *file; /* NULL: nothing is kept, or it could not be */
    cpa_row_file row;
    char path[256];
    char said[320]; /* what there is to say of it, to be put behind a message; "" */
} cpa_verify_dump;

/* Begins the file of the sample, of which `keys` keys will be put. `row` has its query, its result and its rules;
 * the matrix of its form is the one that was taken last. */
void cpa_verify_dump_begin(cpa_verify_dump *dump, const cpa_verify *verify, const cpa_step_plan *plan,
                           const cpa_verify_wrong_row *wrong, const cpa_reference_row *row, int64_t keys);
void cpa_verify_dump_key(cpa_verify_dump *dump, cpa_row_file_key key, const float *k, const float *v);
/* Sets `said`. */
void cpa_verify_dump_end(cpa_verify_dump *dump, const cpa_verify *verify);

#endif
