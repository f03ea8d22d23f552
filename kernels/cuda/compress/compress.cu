/* compress_state_write and compress_halo_pack: a thread has 16 bytes of a row. compress_write: a CTA takes the tokens
 * of a chunk, and of each that ends an entry makes it; a thread has four channels. Of a short window it has all rows,
 * scores in registers and keys in shared memory; else each fourth row, and what these leave is summed in shared memory.
 * Entries but those of CPA_FP8_T64 wait there for the warp that stores them. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/compress/entry_row.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

constexpr int CHANNELS = 4, MOST_ROWS = 2 * CPA_COMPRESS_MOST_RATIO, WINDOW_PARTS = CPA_WINDOW_PARTS;
constexpr int SHORT_WINDOW = 8, SHORT_THREADS = CPA_ENTRY_DIM / CHANNELS;

/* ---- compress_state_write ---- */

struct state_args {
    cpa_compress_state_write_args call;
    cpa_cuda_bad_slot *bad_slot;
};

__global__ void __launch_bounds__(THREADS) compress_state_write(const __grid_constant__ state_args s) {
    const cpa_compress_state_write_args &a = s.call;
    const int32_t width = cpa_compress_width(&a.state), units = 2 * width / CHANNELS;
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, token = index / units;
    dependent_allow();
    dependent_wait();
    if (token >= a.tokens) return;
    const int32_t unit = (int32_t)(index - token * units), column = unit * CHANNELS;
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    if (slot >= a.state.num_blocks * a.state.block_size) {
        if (unit == 0) tell_bad_slot(s.bad_slot, token, slot);
        return;
    }
    float value[CHANNELS];
    if (column < width) {
        load_floats(a.kv + token * a.kv_stride + column, value);
    } else {
        const int64_t line = (a.positions[token] % a.state.ratio + a.state.ratio) % a.state.ratio;
        float ape[CHANNELS];
        load_floats(a.score + token * a.score_stride + column - width, value);
        load_floats(a.ape + line * width + column - width, ape);
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) value[e] += ape[e];
    }
    store_floats(a.state.rows + slot * 2 * width + column, value);
}

/* ---- compress_halo_pack ---- */

__global__ void __launch_bounds__(THREADS) compress_halo_pack(const __grid_constant__ cpa_compress_halo_pack_args a) {
    const int32_t head = a.state.head, units = 2 * head / CHANNELS;
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = index / units;
    dependent_allow();
    dependent_wait();
    if (row >= a.halos * a.state.ratio) return;
    const int32_t column = (int32_t)(index - row * units) * CHANNELS, part = column >= head;
    const int64_t slot = a.slots[row];
    float value[CHANNELS] = {NAN, NAN, NAN, NAN};
    if (slot >= 0 && slot < a.state.num_blocks * a.state.block_size)
        load_floats(a.state.rows + (2 * slot + part) * cpa_compress_width(&a.state) + column - part * head, value);
    store_floats(a.out + row * 2 * head + column, value);
}

/* ---- compress_write ---- */

struct compress_args {
    cpa_compress_write_args call;
    entry_pool pool;
    int32_t chunk; /* tokens of a CTA */
};

/* An entry that is being made. */
struct shared_entry {
    float squares[CPA_ENTRY_DIM / (WARP_LANES * CHANNELS)];
    float row[CPA_ENTRY_DIM];
};

struct shared_window {
    const float *keys[MOST_ROWS], *scores[MOST_ROWS]; /* of rows that are not in front of position 0 */
    float parts[3][WINDOW_PARTS][CPA_ENTRY_DIM];             /* largest scores, sums of weights, sums of keys */
    shared_entry entry;
};

/* Of this thread. */
struct thread_place {
    int32_t part, column;

    __device__ thread_place(int32_t head)
        : part((int32_t)threadIdx.x / (head / CHANNELS)), column((int32_t)threadIdx.x % (head / CHANNELS) * CHANNELS) {}
};

/* Finds the rows of the window; false, which all threads agree on, where one cannot be. */
__device__ bool find_rows(const compress_args &c, int64_t token, shared_window &shared) {
    const cpa_compress_write_args &a = c.call;
    bool is_wrong = false;
    for (int32_t w = threadIdx.x; w < cpa_window_rows(&a.state); w += blockDim.x) {
        const char *what;
        const int64_t fault = cpa_window_fault(&a, token, w, &what);
        if (fault >= 0) {
            tell_bad_slot(c.pool.bad_slot, token, fault);
            is_wrong = true;
            continue;
        }
        if (cpa_window_is_before(&a, token, w)) continue;
        const cpa_window_row row = cpa_window_row_of(&a, token, w);
        shared.keys[w] = row.keys;
        shared.scores[w] = row.keys + row.scores;
    }
    return !__syncthreads_or(is_wrong);
}

/* The channels of the rows of a part that there are: every WINDOW_PARTS-th row from `first` on. */
struct part_rows {
    const shared_window &shared;
    int32_t first, end, column;

    /* The first `before` rows of the window lie in front of position 0. */
    __device__ part_rows(const shared_window &shared, const thread_place &at, int32_t before, int32_t rows)
        : shared(shared), first(before + (at.part - before % WINDOW_PARTS + WINDOW_PARTS) % WINDOW_PARTS), end(rows),
          column(at.column) {}

    /* visit(score, keys) of each row, ascending; the second means something WITH_KEYS alone. */
    template <bool WITH_KEYS, typename Visit>
    __device__ void for_each(const Visit &visit) const {
#pragma unroll 4
        for (int32_t w = first; w < end; w += WINDOW_PARTS) {
            float of_scores[CHANNELS], of_keys[CHANNELS];
            load_floats(shared.scores[w] + column, of_scores);
            if (WITH_KEYS) load_floats(shared.keys[w] + column, of_keys);
            visit(of_scores, of_keys);
        }
    }
};

/* The sum of what the parts left of four channels. */
__device__ void sum_parts(const float (&parts)[WINDOW_PARTS][CPA_ENTRY_DIM], int32_t column, float (&sum)[CHANNELS]) {
    float of[WINDOW_PARTS][CHANNELS];
#pragma unroll
    for (int p = 0; p < WINDOW_PARTS; p++) load_floats(&parts[p][column], of[p]);
#pragma unroll
    for (int e = 0; e < CHANNELS; e++) sum[e] = (of[0][e] + of[1][e]) + (of[2][e] + of[3][e]);
}

/* out = what the window's softmax leaves of the thread's channels. All threads come here. */
__device__ void pool_window(shared_window &shared, const thread_place &at, const part_rows &rows,
                            float (&out)[CHANNELS]) {
    using four = float[CHANNELS];
    float most[CHANNELS], total[CHANNELS] = {}, sum[CHANNELS] = {};
    const auto raise = [&](const four &score) {
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) most[e] = score[e] > most[e] ? score[e] : most[e];
    };
#pragma unroll
    for (int e = 0; e < CHANNELS; e++) most[e] = -INFINITY;
    rows.for_each<false>([&](const four &score, const four &) { raise(score); });
    store_floats(&shared.parts[0][at.part][at.column], most);
    __syncthreads();
#pragma unroll
    for (int p = 0; p < WINDOW_PARTS; p++) {
        float of_part[CHANNELS];
        load_floats(&shared.parts[0][p][at.column], of_part);
        raise(of_part);
    }
    rows.for_each<false>([&](const four &score, const four &) {
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) total[e] += cpa_compress_exp(score[e] - most[e]);
    });
    store_floats(&shared.parts[1][at.part][at.column], total);
    __syncthreads();
    sum_parts(shared.parts[1], at.column, total);
    rows.for_each<true>([&](const four &score, const four &keys) {
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) sum[e] += cpa_compress_exp(score[e] - most[e]) / total[e] * keys[e];
    });
    store_floats(&shared.parts[2][at.part][at.column], sum);
    __syncthreads();
    sum_parts(shared.parts[2], at.column, out);
}

/* The sum of squares of the head, by the threads of the first part: of neighbours first. All threads come here. */
__device__ float head_squares(shared_entry &shared, bool is_first, int32_t head, const float (&x)[CHANNELS]) {
    const int32_t warps = head / (WARP_LANES * CHANNELS);
    float sum = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
#pragma unroll
    for (int step = 1; step < WARP_LANES; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (is_first && threadIdx.x % WARP_LANES == 0) shared.squares[threadIdx.x / WARP_LANES] = sum;
    __syncthreads();
    const float *of = shared.squares;
    return warps == 1 ? of[0] : warps == 2 ? of[0] + of[1] : (of[0] + of[1]) + (of[2] + of[3]);
}

/* Stores four channels of an entry of CPA_FP8_T64, as store_entry does: neighbouring lanes have a tile. All lanes of
 * the warp come here. */
__device__ void store_tile_channels(const entry_pool &pool, int64_t token, int64_t slot, int32_t column,
                                    const float (&x)[CHANNELS]) {
    constexpr int LANES = POWER_TILE / CHANNELS, CODED = CPA_ENTRY_DIM - TILE_TAIL;
    const uint32_t low = pack_pair<__nv_bfloat16>(x[0], x[1]), high = pack_pair<__nv_bfloat16>(x[2], x[3]);
    const float rounded[CHANNELS] = {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                                     __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u)};
    const uint32_t exponent =
        cpa_power_exponent(lanes_most(largest_finite<CHANNELS>(rounded), LANES), CPA_ENTRY_FLOOR);
    if (slot >= pool.slots) {
        if (threadIdx.x == 0) tell_bad_slot(pool.bad_slot, token, slot);
        return;
    }
    const int64_t offset = slot & ((1 << pool.block_shift) - 1);
    char *block = pool.memory + (slot >> pool.block_shift) * pool.block_stride;
    char *row = block + offset * pool.token_stride;
    uint8_t *bytes = (uint8_t *)block + pool.words_at + offset * POWER_SCALES;
    if (threadIdx.x % LANES == 0) bytes[column / POWER_TILE] = (uint8_t)(column < CODED ? exponent : 0);
    if (column < CODED) {
        const float inverse = inverse_power(exponent);
        *(uint32_t *)(row + column) = e4m3_four(rounded[0] * inverse, rounded[1] * inverse, rounded[2] * inverse,
                                                rounded[3] * inverse);
    } else {
        *(uint2 *)(row + CODED + (column - CODED) * 2) = make_uint2(low, high);
    }
}

/* Stores the entry that a window left in the threads of the first part. All threads come here. */
__device__ void finish_entry(const compress_args &c, int64_t token, shared_entry &shared, bool is_first, int32_t column,
                             float (&x)[CHANNELS]) {
    const cpa_compress_write_args &a = c.call;
    const int lane = threadIdx.x % WARP_LANES;
    const float norm = cpa_entry_norm(head_squares(shared, is_first, a.state.head, x), a.state.head, a.eps);
    if (is_first) {
        float weight[CHANNELS];
        load_floats(a.weight + column, weight);
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) x[e] = x[e] * norm * weight[e];
        turn_columns(x, column, a.rope, a.positions[token] + 1 - a.state.ratio);
        if (c.pool.dtype == CPA_FP8_T64) store_tile_channels(c.pool, token, a.slots[token], column, x);
        store_floats(&shared.row[column], x);
    }
    if (c.pool.dtype == CPA_FP8_T64) return;
    __syncthreads();
    if (threadIdx.x >= WARP_LANES) return;
    lane_row row = {};
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        if (part_first(p, lane) >= a.state.head) continue;
#pragma unroll
        for (int e = 0; e < PART; e++) row[p][e] = shared.row[part_first(p, lane) + e];
    }
    store_entry(c.pool, token, a.slots[token], row, lane);
}

__device__ int32_t rows_before(const cpa_compress_write_args &a, int64_t token) {
    const int64_t before = cpa_window_rows(&a.state) - 1 - a.positions[token];
    return before > 0 ? (int32_t)before : 0;
}

__device__ void make_entry(const compress_args &c, int64_t token, shared_window &shared) {
    const cpa_compress_write_args &a = c.call;
    const thread_place at(a.state.head);
    const part_rows rows(shared, at, rows_before(a, token), cpa_window_rows(&a.state));
    float x[CHANNELS];
    pool_window(shared, at, rows, x);
    finish_entry(c, token, shared.entry, at.part == 0, at.column, x);
}

__global__ void __launch_bounds__(WINDOW_PARTS *CPA_ENTRY_DIM / CHANNELS)
    compress_write(const __grid_constant__ compress_args c) {
    __shared__ __align__(16) shared_window shared;
    const cpa_compress_write_args &a = c.call;
    const int64_t first = (int64_t)blockIdx.x * c.chunk, end = min(first + c.chunk, a.tokens);
    dependent_allow();
    dependent_wait();
    for (int64_t token = first; token < end; token++) {
        if (a.slots[token] < 0 || !cpa_compress_ends(&a.state, a.positions[token])) continue;
        if (find_rows(c, token, shared)) make_entry(c, token, shared);
        __syncthreads(); /* the next window is found in the same memory */
    }
}

/* ---- compress_write of short windows ---- */

/* e^x as cpa_compress_exp has it, for x from LEAST_NEAR to 0, and NaN: the product of n is exact, and so is the power. */
constexpr float LEAST_NEAR = -80;
__device__ float exp_near(float x) {
    const float log2_e = 0x1.715476p+0f, round = 0x1.8p+23f, ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
    const float terms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1, 1};
    const float shifted = x * log2_e + round, n = shifted - round;
    const float r = __fmaf_rn(-n, ln2_high, x) - n * ln2_low;
    float sum = terms[0];
#pragma unroll
    for (int i = 1; i < 8; i++) sum = sum * r + terms[i];
    return sum * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
}

/* Quotients by a number, rounded once, where all are far from the ends of fp32's range: what a division does there
 * (Markstein, IBM Journal of Research and Development 34, 1990). */
struct divisor_near {
    float number, inverse;

    __device__ explicit divisor_near(float number) : number(number) {
        float about;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(number));
        inverse = __fmaf_rn(about, __fmaf_rn(-number, about, 1), about);
    }
    __device__ float divide(float x) const {
        const float first = x * inverse, second = __fmaf_rn(inverse, __fmaf_rn(-number, first, x), first);
        return __fmaf_rn(inverse, __fmaf_rn(-number, second, x), second);
    }
};

/* Four channels of each row of a window, whose keys wait in shared memory. A row that is none has keys of 0 and scores
 * of -infinity, which change no sum: none of them is -0, and where another score leaves no weight but NaN, all are. */
struct short_window {
    float score[SHORT_WINDOW][CHANNELS];

    /* out = what the softmax leaves of them; the scores become weights. */
    __device__ void pool(const float4 *keys, float (&out)[CHANNELS]) {
        float most[CHANNELS];
        bool far = false; /* some scores of a channel are: then in the plain way, with the same bits */
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) {
            float least = most[e] = score[0][e];
#pragma unroll
            for (int w = 1; w < SHORT_WINDOW; w++)
                most[e] = fmaxf(most[e], score[w][e]), least = fminf(least, score[w][e]);
            far |= least - most[e] < LEAST_NEAR;
        }
        if (far)
            weigh<true>(most);
        else
            weigh<false>(most);
        float sum[WINDOW_PARTS][CHANNELS] = {};
#pragma unroll
        for (int w = 0; w < SHORT_WINDOW; w++) {
            const float4 four = keys[w * SHORT_THREADS + threadIdx.x];
            const float of_row[CHANNELS] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < CHANNELS; e++) sum[w % WINDOW_PARTS][e] += score[w][e] * of_row[e];
        }
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) out[e] = (sum[0][e] + sum[1][e]) + (sum[2][e] + sum[3][e]);
    }

    /* Scores become their parts of the softmax. */
    template <bool FAR>
    __device__ void weigh(const float (&most)[CHANNELS]) {
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) {
            float total[WINDOW_PARTS] = {};
#pragma unroll
            for (int w = 0; w < SHORT_WINDOW; w++) {
                const float x = score[w][e] - most[e];
                score[w][e] = FAR ? cpa_compress_exp(x) : exp_near(x);
                total[w % WINDOW_PARTS] += score[w][e];
            }
            const float all = (total[0] + total[1]) + (total[2] + total[3]);
            const divisor_near by(all);
#pragma unroll
            for (int w = 0; w < SHORT_WINDOW; w++)
                score[w][e] = FAR ? __fdiv_rn(score[w][e], all) : by.divide(score[w][e]);
        }
    }
};

/* Reads a window, whose rows each warp finds, a row a lane; false, which all threads agree on, where one cannot be. */
__device__ bool load_window(const compress_args &c, int64_t token, int32_t column, short_window &window,
                            float4 *keys_at) {
    const cpa_compress_write_args &a = c.call;
    const int32_t lane = threadIdx.x % WARP_LANES;
    const char *what;
    cpa_window_row row = {};
    const int32_t before = rows_before(a, token), end = cpa_window_rows(&a.state);
    const int64_t fault = lane < end ? cpa_window_fault(&a, token, lane, &what) : -1;
    if (fault >= 0 && threadIdx.x < WARP_LANES) tell_bad_slot(c.pool.bad_slot, token, fault);
    if (__any_sync(0xffffffff, fault >= 0)) return false;
    if (lane < end) row = cpa_window_row_of(&a, token, lane);
#pragma unroll
    for (int w = 0; w < SHORT_WINDOW; w++) {
        const float *keys = (const float *)__shfl_sync(0xffffffff, (unsigned long long)row.keys, w);
        const int32_t scores = __shfl_sync(0xffffffff, (int32_t)row.scores, w);
#pragma unroll
        for (int e = 0; e < CHANNELS; e++) window.score[w][e] = -INFINITY;
        const bool is_row = w >= before && w < end;
        if (is_row) load_floats(keys + scores + column, window.score[w]);
        copy_async_16((uint32_t)__cvta_generic_to_shared(keys_at + w * SHORT_THREADS + threadIdx.x), keys + column,
                      is_row);
    }
    copy_async_commit();
    return true;
}

__global__ void __launch_bounds__(SHORT_THREADS, 6) compress_write_short(const __grid_constant__ compress_args c) {
    __shared__ __align__(16) shared_entry shared;
    __shared__ float4 keys[SHORT_WINDOW * SHORT_THREADS];
    const cpa_compress_write_args &a = c.call;
    const int32_t lane = threadIdx.x % WARP_LANES, column = (int32_t)threadIdx.x * CHANNELS;
    const int64_t first = (int64_t)blockIdx.x * c.chunk;
    dependent_allow();
    dependent_wait();
    const bool is_end = lane < c.chunk && first + lane < a.tokens && a.slots[first + lane] >= 0 &&
                        cpa_compress_ends(&a.state, a.positions[first + lane]);
    for (uint32_t ends = __ballot_sync(0xffffffff, is_end); ends; ends &= ends - 1) {
        const int64_t token = first + __ffs((int)ends) - 1;
        short_window window;
        float x[CHANNELS];
        if (!load_window(c, token, column, window, keys)) continue;
        copy_async_wait<0>();
        window.pool(keys, x);
        finish_entry(c, token, shared, true, column, x);
        __syncthreads(); /* the next entry is made in the same memory */
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_compress_state_write(const cpa_compress_state_write_args *args, cpa_stream *stream) {
    const int64_t units = 2 * cpa_compress_width(&args->state) / CHANNELS, most = (int64_t)INT32_MAX * THREADS;
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->tokens > most / units)
        return cpa_cuda_unsupported(stream, "compress_state_write: more rows than a grid takes", args->tokens);
    const state_args s = {*args, ((cpa_cuda_stream *)stream)->bad_slot};
    return launch_early(compress_state_write, dim3((unsigned)((args->tokens * units + THREADS - 1) / THREADS)), THREADS,
                        s, stream, "compress_state_write");
}

extern "C" cpa_status cpa_cuda_compress_halo_pack(const cpa_compress_halo_pack_args *args, cpa_stream *stream) {
    const int64_t units = 2 * args->state.head / CHANNELS, rows = args->halos * args->state.ratio;
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (rows > (int64_t)INT32_MAX * THREADS / units)
        return cpa_cuda_unsupported(stream, "compress_halo_pack: more rows than a grid takes", rows);
    return launch_early(compress_halo_pack, dim3((unsigned)((rows * units + THREADS - 1) / THREADS)), THREADS, *args,
                        stream, "compress_halo_pack");
}

static entry_pool pool_of(const cpa_compress_write_args &args, cpa_stream *stream) {
    entry_pool pool = {};
    if (!args.mxfp4) return entry_pool_of(args.kv, stream);
    pool.slots = args.mxfp4_rows;
    pool.dim = args.state.head;
    pool.bad_slot = ((cpa_cuda_stream *)stream)->bad_slot;
    pool.mxfp4 = args.mxfp4, pool.mxfp4_scales = args.mxfp4_scales;
    return pool;
}

extern "C" cpa_status cpa_cuda_compress_write(const cpa_compress_write_args *args, cpa_stream *stream) {
    const int64_t few = 4096; /* tokens that have a CTA each */
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const compress_args c = {*args, pool_of(*args, stream), args->tokens <= few ? 1 : args->state.ratio};
    const int64_t ctas = (args->tokens + c.chunk - 1) / c.chunk;
    if (ctas > INT32_MAX)
        return cpa_cuda_unsupported(stream, "compress_write: more tokens than a grid takes", args->tokens);
    if (cpa_window_rows(&args->state) <= SHORT_WINDOW)
        return launch_early(compress_write_short, dim3((unsigned)ctas), args->state.head / CHANNELS, c, stream,
                            "compress_write");
    return launch_early(compress_write, dim3((unsigned)ctas), WINDOW_PARTS * args->state.head / CHANNELS, c, stream,
                        "compress_write");
}
