/* Attention without a cache on one process: three images in one tensor of queries, keys and values, each of which sees
 * all of itself, and where the images would be attended if there were two ranks.
 *
 * Prints the largest difference from plain attention and exits 1 if it is more than rounding. */
#include <cpattn/cpattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { IMAGES = 3, ROWS = 577 + 196 + 256, HEADS = 4, DIM = 72, WIDTH = HEADS * DIM };

static const int64_t starts[IMAGES + 1] = {0, 577, 577 + 196, ROWS};

/* Ends the program with the library's message. */
static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "varlen: %s: %s\n", cpa_status_name(status), message);
    exit(1);
}

/* A row of one head, the plain way: the sum of the values of its image, weighted by exp(q k / sqrt(DIM)). */
static double difference_of(const float *qkv, const float *out, int64_t begin, int64_t end, int64_t row, int head) {
    double sum = 0, o[DIM] = {0}, most = 0;
    for (int64_t key = begin; key < end; key++) {
        const float *q = qkv + row * 3 * WIDTH + head * DIM, *k = qkv + key * 3 * WIDTH + WIDTH + head * DIM;
        double score = 0;
        for (int d = 0; d < DIM; d++) score += (double)q[d] * (double)k[d];
        const double p = exp(score / sqrt(DIM));
        for (int d = 0; d < DIM; d++) o[d] += p * (double)k[WIDTH + d];
        sum += p;
    }
    for (int d = 0; d < DIM; d++) most = fmax(most, fabs(o[d] / sum - (double)out[row * WIDTH + head * DIM + d]));
    return most;
}

int main(void) {
    cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 1};
    cpa_device *device = NULL;
    cpa_stream *stream = NULL;
    cpa_attend_plan *plan = NULL;
    void *qkv, *out;
    cpa_error err;
    require(cpa_device_open(&options, &device, &err), err.message);
    require(cpa_stream_create(device, &stream, &err), err.message);
    require(cpa_device_alloc(device, (int64_t)ROWS * 3 * WIDTH * (int64_t)sizeof(float), &qkv, &err), err.message);
    require(cpa_device_alloc(device, (int64_t)ROWS * WIDTH * (int64_t)sizeof(float), &out, &err), err.message);
    float *rows = qkv; /* [ROWS, 3, HEADS, DIM]; host memory, as the device is the host */
    for (int64_t i = 0; i < (int64_t)ROWS * 3 * WIDTH; i++) rows[i] = (float)rand() / (float)RAND_MAX * 2 - 1;

    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = HEADS,
                                    .kv_heads = HEADS,
                                    .k_dim = DIM,
                                    .v_dim = DIM,
                                    .n_segments = IMAGES,
                                    .q_starts = starts};
    require(cpa_attend_plan_create(device, &plan, &err), err.message);
    require(cpa_varlen_plan_set(plan, &batch, &err), err.message); /* once a batch; good for every layer */
    const cpa_varlen_attend_args args = {.size = sizeof args,
                                         .dtype = CPA_F32,
                                         .q = rows,
                                         .k = rows + WIDTH,
                                         .v = rows + 2 * WIDTH,
                                         .q_row_stride = 3 * WIDTH,
                                         .k_row_stride = 3 * WIDTH,
                                         .v_row_stride = 3 * WIDTH,
                                         .out = out};
    require(cpa_varlen_attend(plan, &args, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream));

    double difference = 0;
    for (int image = 0; image < IMAGES; image++) {
        for (int64_t row = starts[image]; row < starts[image + 1]; row += 50)
            difference =
                fmax(difference, difference_of(rows, out, starts[image], starts[image + 1], row, image % HEADS));
    }
    int32_t owners[IMAGES];
    const cpa_varlen_deal_args deal = {.size = sizeof deal, .ranks = 2, .dtype = CPA_F32};
    require(cpa_varlen_deal(&batch, &deal, owners, &err), err.message);
    printf("varlen: off by at most %.2g; of two ranks %d, %d and %d would have the images\n", difference, owners[0],
           owners[1], owners[2]);

    cpa_attend_plan_destroy(plan);
    cpa_device_free(device, out);
    cpa_device_free(device, qkv);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    return difference <= 1e-5 ? 0 : 1;
}
