/* synthesize: the generator whose formula kernels/synthesize.c documents, bit for bit; compiled without
 * contraction of a * b + c. A CTA fills rows of one head, a thread four neighbouring elements at a time. */
#include "base/hash.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int THREADS = 256, ROWS_A_CTA = 64, QUAD = 4;
constexpr int WAVE_PAIRS = 4, HEAVY_ONE_IN = 64, LOOKING_ONE_IN = 4, SINK_KEYS = 4;
constexpr uint64_t DIRECTION_SINK = 16, DIRECTION_FAR = 17, DIRECTION_VALUE = 18, HASH_HEAVY = 19, HASH_LOOKING = 20;
constexpr float SINK_SCORE = 6, FAR_SCORE = 7, LOCAL_SCORE = 9, VALUE_OFFSET = 2;
constexpr float NOISE_UNIT = 0x1.39897ep-7f;

__device__ uint64_t chain(uint64_t h, uint64_t x) {
    return cpa_mix64((h ^ x) + CPA_GOLDEN);
}

__device__ uint64_t head_key(const cpa_synth_args &args, uint64_t tag, int32_t head) {
    return chain(chain(chain(args.seed, tag), (uint64_t)args.layer), (uint64_t)head);
}

__device__ float wave(uint64_t x, uint32_t period) {
    int64_t t = period, slope = 4 * (int64_t)(x % period) - 2 * t;
    return (float)((slope < 0 ? -slope : slope) - t) / (float)t;
}

/* What the rows of one head share. */
struct head_pattern {
    uint64_t key;
    int32_t waves; /* leading elements that carry the position */
    float local;
    float sink[CPA_MAX_HEAD_DIM], far[CPA_MAX_HEAD_DIM], value[CPA_MAX_HEAD_DIM];
};

__device__ float signed_amplitude(uint64_t direction_key, int32_t e, float amplitude) {
    return cpa_mix64(direction_key + (uint64_t)(e / 64)) >> (e % 64) & 1 ? amplitude : -amplitude;
}

/* Filled by all threads of the CTA. */
__device__ void begin_head(head_pattern &pattern, const cpa_synth_args &args, int32_t head) {
    const int32_t pairs = min(args.dim / 8, WAVE_PAIRS), kv_head = head / (args.heads / args.kv_heads);
    const float root = sqrtf((float)args.dim), rest = (float)(args.dim - 2 * pairs);
    const float sink = sqrtf(SINK_SCORE * root / rest), far = sqrtf(FAR_SCORE * root / rest);
    const uint64_t sink_key = head_key(args, DIRECTION_SINK, kv_head), far_key = head_key(args, DIRECTION_FAR, kv_head);
    const uint64_t value_key = head_key(args, DIRECTION_VALUE, kv_head);
    if (threadIdx.x == 0) {
        pattern.key = head_key(args, args.tensor, head);
        pattern.waves = 2 * pairs;
        pattern.local = pairs ? sqrtf(LOCAL_SCORE * root / (float)pairs) : 0;
    }
    for (int32_t e = threadIdx.x; e < args.dim; e += THREADS) {
        pattern.sink[e] = signed_amplitude(sink_key, e, sink);
        pattern.far[e] = signed_amplitude(far_key, e, far);
        pattern.value[e] = signed_amplitude(value_key, e, VALUE_OFFSET);
    }
}

__device__ float element(const cpa_synth_args &args, const head_pattern &pattern, int32_t e, float noise, bool heavy,
                         bool looking, uint64_t position) {
    constexpr uint32_t periods[WAVE_PAIRS] = {256, 320, 448, 704};
    if (args.tensor == CPA_SYNTH_V) return heavy ? noise + pattern.value[e] : noise;
    if (e < pattern.waves) {
        uint32_t period = periods[e / 2];
        return pattern.local * wave(position + (e & 1) * (period / 4), period);
    }
    const bool is_query = args.tensor == CPA_SYNTH_Q;
    if (is_query || position < SINK_KEYS) noise += pattern.sink[e];
    return (is_query ? looking : heavy) ? noise + pattern.far[e] : noise;
}

__global__ void __launch_bounds__(THREADS) synthesize(const __grid_constant__ cpa_synth_args args) {
    __shared__ head_pattern pattern;
    const int32_t head = blockIdx.y, quads = (args.dim + QUAD - 1) / QUAD;
    const int64_t first = (int64_t)blockIdx.x * ROWS_A_CTA, left = args.rows - first;
    const int32_t rows = (int32_t)(left < ROWS_A_CTA ? left : ROWS_A_CTA);
    begin_head(pattern, args, head);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < rows * quads; i += THREADS) {
        const int64_t row = first + i / quads;
        const int32_t quad = i % quads;
        const uint64_t token = args.tokens[row], position = (uint64_t)args.positions[row];
        const bool heavy = chain(HASH_HEAVY, token) % HEAVY_ONE_IN == 0;
        const bool looking = chain(chain(HASH_LOOKING, token), position) % LOOKING_ONE_IN == 0;
        const uint64_t key = chain(chain(pattern.key, token), position);
        const uint64_t bytes = cpa_mix64(key + (uint64_t)(quad + 1) * CPA_GOLDEN);
        for (int32_t j = 0; j < QUAD && quad * QUAD + j < args.dim; j++) {
            const int32_t pair = (int32_t)(bytes >> (16 * j) & 255) + (int32_t)(bytes >> (16 * j + 8) & 255);
            const int32_t e = quad * QUAD + j;
            const float noise = (float)(pair - 255) * NOISE_UNIT;
            write_element(args.out, args.dtype, (row * args.heads + head) * args.dim + e,
                          element(args, pattern, e, noise, heavy, looking, position));
        }
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_synthesize(const cpa_synth_args *args, cpa_stream *stream) {
    if (args->rows == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const dim3 grid((unsigned)((args->rows + ROWS_A_CTA - 1) / ROWS_A_CTA), args->heads);
    synthesize<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "synthesize");
}
