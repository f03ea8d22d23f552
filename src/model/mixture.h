/* The mixture of experts of a sparse layer: a router chooses experts for each row; rows are multiplied in the order of
 * their experts, and what these give is added up by how much it counts (cpattn/experts.h). Rows are taken in pieces,
 * so that what is sorted has a bounded size.
 *
 * All experts are on every rank; or they are spread, and each rank has some as a whole. Then rows go to the ranks of
 * their experts, and come back, with the same bits (mixture_sent.h); or all rows go to all ranks that have experts, and
 * what these give for a row is added up where the row is (mixture_gathered.h). In steps with slices each rank has all
 * rows and computes what its experts give for them; the sums of all ranks are added up. */
#ifndef CPA_MODEL_MIXTURE_H
#define CPA_MODEL_MIXTURE_H

#include <cpattn/model.h>

#include "src/model/weights.h"

/* Choices (a row and one of its experts) sorted by expert, as cpa_expert_permute gives them. */
typedef struct cpa_sorted_choices {
    int32_t *offsets; /* [experts + 1] */
    uint32_t *tokens; /* [rows * top_k] */
    int32_t *places;  /* [rows, top_k] */
} cpa_sorted_choices;

/* How it is computed, and the room for one piece. On the device of the weights. */
typedef struct cpa_mixture {
    const cpa_model_config *config;
    cpa_dtype dtype;
    cpa_slice held;      /* experts whose weights this rank has */
    int32_t spread_over; /* ranks; 1: every rank has all experts */
    int gathers;         /* with spread_over > 1: all rows go to all ranks; 0: rows go where their experts are */
    int64_t piece;       /* rows of this rank that are computed at once */
    /* For `rows`, piece or, with `gathers`, spread_over * piece. */
    float *logits;  /* [rows, experts] of the router */
    int32_t *ids;   /* [rows, top_k] experts of a row */
    float *weights; /* [rows, top_k] how much they count */
    cpa_sorted_choices choices;
    void *wide;  /* [places, 2 * intermediate], then [places, hidden] */
    void *inner; /* [places, intermediate] */
    /* With `gathers`. */
    void *gathered;  /* [spread_over * piece, hidden] rows of all ranks */
    float *part;     /* [spread_over * piece, hidden] what this rank's experts give for them */
    float *received; /* [spread_over, piece, hidden] what the experts of each rank give for this one's rows */
    /* With spread_over > 1 and without `gathers`. */
    void *sorted;                /* [piece * top_k, hidden] rows to other ranks, then what these gave */
    void *arrived;               /* [arrivals, hidden] rows of all ranks for this one's experts, then what these give */
    int32_t *arrived_ids;        /* [arrivals] their experts */
    cpa_sorted_choices arrivals; /* the same, sorted */
} cpa_mixture;

/* Without room yet; `gathers` means nothing where experts are spread over 1 rank. */
cpa_mixture cpa_mixture_of(const cpa_model_config *config, cpa_dtype dtype, cpa_weights_part held, int32_t spread_over,
                           int gathers, int64_t piece);
/* Gives it room in `memory`, and returns how many bytes that has to have; NULL: it only counts them. */
int64_t cpa_mixture_place(cpa_mixture *mixture, void *memory);

/* The products of shared experts, which those of experts may take beside them: gates, and what comes behind. */
typedef struct cpa_shared_products {
    cpa_linear_args gate_up, down; /* strides are set; the former gives what swiglu makes of it */
    int adds;                      /* the result of down is added to its out */
} cpa_shared_products;

/* Rows of a step. */
typedef struct cpa_mixture_rows {
    const cpa_model_step *step; /* whose slices, row_exchange and rank_rows are used */
    const void *x;              /* [rows, hidden] */
    void *out;                  /* [rows, hidden]; may be x or added */
    const void *added;          /* [rows, hidden] added to what experts give; NULL with slices, or where nothing is */
    float *part;                /* with slices room for [rows, hidden]: the own part of a sum */
    const cpa_shared_products
        *beside; /* to be computed as well, before `added` is read, where cpa_mixture_takes says so;
                                        * NULL: nothing */
} cpa_mixture_rows;
/* Whether shared experts' products may be computed beside those of so many rows of the step. */
int cpa_mixture_takes(const cpa_mixture *mixture, const cpa_model_step *step, const cpa_stream *stream);
/* Of experts that are not spread, or of a step with slices. */
cpa_status cpa_mixture_run(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights,
                           const cpa_mixture_rows *rows, cpa_stream *stream);

/* What a piece is computed by, for mixture_sent.c too: fills ids and weights, which experts rows have and how much these
 * count; */
cpa_status cpa_mixture_route(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights, const void *x,
                             int64_t rows, cpa_stream *stream);
/* and fills `wide`: what `experts` give for rows of x, at so many places. */
cpa_status cpa_mixture_multiply(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights, cpa_slice experts,
                                const cpa_sorted_choices *choices, int64_t places, const void *x, int64_t x_rows,
                                const cpa_shared_products *beside, cpa_stream *stream);

/* Rows that are computed at once, and where what experts give for them goes. */
typedef struct cpa_mixture_piece {
    int64_t rows;
    const void *x;                     /* [rows, hidden] */
    void *out;                         /* [rows, hidden] */
    cpa_dtype dtype;                   /* dtype of `out`: that of the mixture, or CPA_F32 */
    const void *added;                 /* [rows, hidden], in that dtype, added to what experts give; NULL: nothing */
    const cpa_shared_products *beside; /* as in cpa_mixture_rows */
} cpa_mixture_piece;
/* All of a piece, for mixture_gathered.c too: what those of `experts` give that its rows have chosen. */
cpa_status cpa_mixture_compute(const cpa_mixture *mixture, const cpa_feed_forward_weights *weights, cpa_slice experts,
                               const cpa_mixture_piece *piece, cpa_stream *stream);

#endif
