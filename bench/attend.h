/* What the cases of bench attend, varlen and varlen_attend attend, and the reference that their results are checked
 * against. */
#ifndef CPA_BENCH_ATTEND_H
#define CPA_BENCH_ATTEND_H

#include <cpattn/ops.h>

#include "bench/benchmark.h"
#include "src/check/cases/score.h"

/* New tokens [first, first + count) of a sequence, which see it up to the last of them; the rows [row, row + count). */
typedef struct cpa_bench_piece {
    int64_t sequence, first, count, row;
} cpa_bench_piece;

/* Sequences in a cache, and steps of new tokens, one attend each. */
typedef struct cpa_bench_attend_work {
    int64_t n_sequences, n_pieces, n_steps, rows;
    int64_t *lengths; /* [n_sequences] tokens in the cache */
    cpa_bench_piece *pieces;
    int64_t *steps; /* [n_steps + 1] first piece of each, and n_pieces */
} cpa_bench_attend_work;

/* shape: sequences x new tokens x context, all in one step. */
cpa_status cpa_bench_attend_work_equal(const cpa_bench_options *options, const int64_t *shape,
                                       cpa_bench_attend_work *out, cpa_error *err);
/* shape: requests x tokens of a step. Whole prompts, first come first served, as many tokens in each step; their
 * lengths are those of --trace, or of the list in attend_work.c. With as-one, one sequence of about the same
 * number of visible pairs, in one step. */
cpa_status cpa_bench_attend_work_varlen(const cpa_bench_options *options, const int64_t *shape,
                                        cpa_bench_attend_work *out, cpa_error *err);
/* Tokens that a sequence has in common with sequence 0, in the same blocks: of the option, whole blocks that both have.
 */
int64_t cpa_bench_shared_tokens(const cpa_bench_options *options, const cpa_bench_attend_work *work, int64_t sequence);
void cpa_bench_attend_work_release(cpa_bench_attend_work *work);

/* Makes the device take the kernels that the case names. */
cpa_status cpa_bench_use_path(cpa_bench_site *site, cpa_error *err);

/* Which kernels an attend of the plan runs; args NULL: as cpa_attend_plan_kernel has it. */
cpa_status cpa_bench_note_kernels(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_bench_row *row,
                                  cpa_error *err);

/* What a benchmark has attended. */
typedef struct cpa_bench_attend_check_args {
    const cpa_bench_attend_work *work;
    const void *out;             /* [rows, q_heads, v_dim], on the device */
    const float *lse;            /* [rows, q_heads], on the device */
    const cpa_case_score *score; /* the rules of the scores, as the reference applies them; NULL: none */
} cpa_bench_attend_check_args;

/* Compares sampled rows with unfused float64 attention over inputs that are synthesized again. */
cpa_status cpa_bench_attend_check(cpa_bench_site *site, const cpa_bench_attend_check_args *args, int64_t *checked,
                                  int64_t *wrong, cpa_error *err);

#endif
