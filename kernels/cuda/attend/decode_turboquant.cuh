/* The decode kernel's way through a cache of TurboQuant (cpattn/shape.h): rows are loaded as they lie, become elements of
 * the queries' dtype in registers, and lie in the stages as those of other caches do. Keys stay rotated and without
 * length: queries are rotated once, and scores are multiplied by what a key's codes call for. What is loaded for a run
 * is under way while the run before it is attended. A lane has half of a key and of a value. */
#ifndef CPA_CUDA_DECODE_TURBOQUANT_CUH
#define CPA_CUDA_DECODE_TURBOQUANT_CUH

#include "kernels/cuda/attend/decode_loads.cuh"
#include "kernels/cuda/attend/decode_warp.cuh"
#include "kernels/cuda/cache/turboquant.cuh"

/* Positive centroids as fp16, their lower and their upper bytes, from which byte_perm takes four at once. */
struct centroid_bytes {
    uint32_t low[2], high[2];

    __device__ explicit centroid_bytes(int bits) {
#pragma unroll
        for (int w = 0; w < 2; w++) {
            low[w] = high[w] = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t half = __half_as_ushort(__float2half_rn(tq_positive(bits, bits == 3 ? i : 4 * w + i)));
                low[w] |= (half & 255) << (8 * i);
                high[w] |= half >> 8 << (8 * i);
            }
        }
    }
};

/* Eight codes of 3 bits, a nibble each. */
__device__ inline uint32_t three_to_four(uint32_t x) {
    x = (x & 0xfff) | (x & 0xfff000) << 4;
    x = (x & 0x003f003f) | (x & 0x0fc00fc0) << 2;
    return (x & 0x07070707) | (x & 0x38383838) << 1;
}

/* Eight codes, a nibble each, as centroids. Those in the upper half of the levels are positive, ascending; the lower
 * half mirrors them. */
__device__ inline void centroids_of(uint32_t codes, int bits, const centroid_bytes &table, float (&x)[8]) {
    const uint32_t top = bits == 3 ? 0x44444444u : 0x88888888u;
    const uint32_t negative = ~codes & top, mirror = negative - (negative >> (bits - 1));
    const uint32_t index = (codes ^ mirror) & (bits == 3 ? 0x33333333u : 0x77777777u), sign = negative << (4 - bits);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const uint32_t select = index >> (16 * part), signs = sign >> (16 * part);
        const uint32_t low = __byte_perm(table.low[0], table.low[1], select);
        uint32_t bytes = (signs & 0xff) | (signs & 0xff00) << 8; /* a nibble's top bit to that of its byte */
        bytes = ((bytes & 0x00080008) << 4) | ((bytes & 0x00800080) << 8);
        const uint32_t high = __byte_perm(table.high[0], table.high[1], select) | bytes;
        const float2 first = __half22float2(bits_pair(__byte_perm(low, high, 0x5140)));
        const float2 last = __half22float2(bits_pair(__byte_perm(low, high, 0x7362)));
        x[4 * part] = first.x, x[4 * part + 1] = first.y, x[4 * part + 2] = last.x, x[4 * part + 3] = last.y;
    }
}

/* Eight codes, a nibble each, plus 1024. */
__device__ inline void raised_codes(uint32_t codes, float (&x)[8]) {
    const uint32_t even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const uint32_t four = __byte_perm(even, odd, part == 0 ? 0x5140 : 0x7362);
        const float2 first = __half22float2(bits_pair(__byte_perm(four, 0x64646464u, 0x4140)));
        const float2 last = __half22float2(bits_pair(__byte_perm(four, 0x64646464u, 0x4342)));
        x[4 * part] = first.x, x[4 * part + 1] = first.y, x[4 * part + 2] = last.x, x[4 * part + 3] = last.y;
    }
}

/* Eight codes of e4m3. */
__device__ inline void widened_codes(uint32_t low_four, uint32_t high_four, float (&x)[8]) {
    const uint32_t fours[2] = {low_four, high_four};
#pragma unroll
    for (int part = 0; part < 2; part++) {
        uint32_t pair[2];
        e4m3_codes::widen(fours[part], 0, pair[0], pair[1]);
        const float2 first = __half22float2(bits_pair(pair[0])), last = __half22float2(bits_pair(pair[1]));
        constexpr float FACTOR = e4m3_codes::FACTOR;
        x[4 * part] = first.x * FACTOR, x[4 * part + 1] = first.y * FACTOR;
        x[4 * part + 2] = last.x * FACTOR, x[4 * part + 3] = last.y * FACTOR;
    }
}

/* Half of a row's codes on their way: as the words that hold them, of which the first may begin two bytes before. */
template <int WORDS>
struct codes_under_way {
    uint32_t words[WORDS + 1];
    uint32_t shift; /* bits before the first code */

    __device__ void fetch(const char *from, int bytes) {
        const uint32_t before = (uintptr_t)from & 2;
        const uint32_t *aligned = (const uint32_t *)(from - before);
        shift = 8 * before;
#pragma unroll
        for (int i = 0; i <= WORDS; i++) words[i] = 4 * i < (int)before + bytes ? __ldg(aligned + i) : 0;
    }
    __device__ uint32_t word(int i) const { return __funnelshift_r(words[i], words[i + 1], shift); }
    /* The n-th eight codes of 3 or 4 bits, a nibble each. */
    __device__ uint32_t nibbles(int bits, int n) const {
        if (bits == 4) return word(n);
        const int at = 24 * n; /* of 3 bits eight are 24 bits */
        const uint32_t low = word(at / 32), high = at % 32 > 8 ? word(at / 32 + 1) : 0;
        return three_to_four(__funnelshift_r(low, high, at % 32) & 0xffffff);
    }
};

/* A warp's way: what lies behind load() of stage_loader (decode_loads.cuh), for one head a CTA. load() of a run stores
 * what the last call has fetched. */
template <typename C>
struct turboquant_loader {
    static constexpr int K_WORDS = C::K_DIM / 2 / 4, V_WORDS = C::V_DIM / 2 / 8; /* of half a row of 8 bits, and of 4 */
    static_assert(C::MEMBERS == 1 && C::STAGES == 3, "a stage is stored while another is attended, and one is free");

    const char *k, *v; /* the head, at token 0 of block 0 */
    const int key_bits, value_bits;
    const centroid_bytes table;
    mutable codes_under_way<K_WORDS> keys;
    mutable codes_under_way<V_WORDS> values;
    mutable uint32_t length, scale_and_least; /* as fp16 */
    mutable uint32_t stage;                   /* where they go; 0: nothing is under way */
    mutable bool valid;                       /* there is such a key */

    __device__ turboquant_loader(const cpa_cuda_attend_args &a, int kv_group, int, int)
        : k(a.k + kv_group * a.k_head_stride), v(a.v + kv_group * a.v_head_stride), key_bits(tq_key_bits(a.kv_dtype)),
          value_bits(tq_value_bits(a.kv_dtype)), table(key_bits), stage(0), valid(false) {}

    /* The run of `keys` keys from key `key` of the item on; where rows lie apart `block` is that of the lane's row. */
    __device__ lane_run run(const cpa_cuda_attend_args &a, int, int block, int key, int count, int lane) const {
        const int token = (key + lane % DECODE_RUN) & ((1 << a.block_shift) - 1);
        return {k + block * a.k_block_stride + token * a.k_token_stride,
                v + block * a.v_block_stride + token * a.v_token_stride, block, token, count};
    }
    __device__ void fetch(const cpa_cuda_attend_args &a, const lane_run &r, int lane) const {
        const int part = lane / DECODE_RUN, k_bytes = a.k_dim * key_bits / 16, v_bytes = a.v_dim * value_bits / 16;
        valid = lane % DECODE_RUN < r.keys;
        if (!valid) return;
        keys.fetch(r.k + part * k_bytes, k_bytes);
        values.fetch(r.v + part * v_bytes, v_bytes);
        length = key_bits == 8 ? 0 : __ldg((const uint16_t *)(r.k + 2 * k_bytes));
        const uint16_t *behind = (const uint16_t *)(r.v + 2 * v_bytes);
        scale_and_least = __ldg(behind) | (uint32_t)__ldg(behind + 1) << 16;
    }
    template <int DIM>
    static __device__ void store_chunk(uint32_t tile, int row, int chunk, const float (&x)[8]) {
        using element = typename C::element;
        const uint32_t words[4] = {pack_pair<element>(x[0], x[1]), pack_pair<element>(x[2], x[3]),
                                   pack_pair<element>(x[4], x[5]), pack_pair<element>(x[6], x[7])};
        store_shared(tile + swizzled<DIM>(row, chunk), words);
    }
    __device__ void store_key(const cpa_cuda_attend_args &a, int lane) const {
        const int row = lane % DECODE_RUN, first = lane / DECODE_RUN * (a.k_dim / 16);
        float squares = 0;
#pragma unroll
        for (int n = 0; n < C::K_DIM / 16; n++) {
            float x[8] = {};
            if (n < a.k_dim / 16) {
                if (!valid) {
                } else if (key_bits == 8) {
                    widened_codes(keys.word(2 * n), keys.word(2 * n + 1), x);
                } else {
                    centroids_of(keys.nibbles(key_bits, n), key_bits, table, x);
                }
#pragma unroll
                for (int e = 0; e < 8; e++) squares = fmaf(x[e], x[e], squares);
                store_chunk<C::K_DIM>(stage, row, first + n, x);
            } else { /* behind the head's columns: half of those there are */
                store_chunk<C::K_DIM>(stage, row, a.k_dim / 8 + 2 * (n - a.k_dim / 16) + lane / DECODE_RUN, x);
            }
        }
        squares += __shfl_xor_sync(0xffffffff, squares, DECODE_RUN);
        const float worth = key_bits == 8 ? 1 : __half2float(__ushort_as_half((uint16_t)length)) * rsqrtf(squares);
        if (lane < DECODE_RUN) store_shared(stage + C::WORDS_AT + lane * 4, __float_as_uint(valid ? worth : 0));
    }
    __device__ void store_value(const cpa_cuda_attend_args &a, int lane) const {
        const int row = lane % DECODE_RUN, first = lane / DECODE_RUN * (a.v_dim / 16);
        const float2 behind = __half22float2(bits_pair(scale_and_least));
        const float scale = behind.x, least = fmaf(-1024, scale, behind.y);
#pragma unroll
        for (int n = 0; n < C::V_DIM / 16; n++) {
            float x[8] = {};
            if (n < a.v_dim / 16) {
                if (valid) {
                    raised_codes(values.nibbles(value_bits, n), x);
#pragma unroll
                    for (int e = 0; e < 8; e++) x[e] = fmaf(scale, x[e], least);
                }
                store_chunk<C::V_DIM>(stage + C::K_BYTES, row, first + n, x);
            } else {
                store_chunk<C::V_DIM>(stage + C::K_BYTES, row,
                                      a.v_dim / 8 + 2 * (n - a.v_dim / 16) + lane / DECODE_RUN, x);
            }
        }
    }
    __device__ void load(const cpa_cuda_attend_args &a, const lane_run &r, uint32_t to, int, int lane) const {
        settle(a, lane);
        fetch(a, r, lane);
        stage = to;
    }
    /* Stores what is under way. */
    __device__ void settle(const cpa_cuda_attend_args &a, int lane) const {
        if (stage == 0) return;
        store_key(a, lane);
        store_value(a, lane);
        stage = 0;
    }
    __device__ void prefetch(const cpa_cuda_attend_args &a, const lane_run &r, int lane) const {
        if (lane % DECODE_RUN >= r.keys) return;
        prefetch_l2(lane < DECODE_RUN ? r.k : r.v);
    }
};

/* q H / sqrt(k_dim) of A operands (load_queries), rounded to the queries' dtype. */
template <typename C>
__device__ void rotate_queries(uint32_t (&q)[C::K_DIM / 16][4], int k_dim, int lane) {
    using element = typename C::element;
    const float factor = rsqrtf((float)k_dim);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[C::K_DIM / 4]; /* column 16 k + 8 side + 2 (lane mod 4) + e is x[4 k + 2 side + e] */
#pragma unroll
        for (int i = 0; i < C::K_DIM / 8; i++) {
            const uint32_t pair = q[i / 2][2 * (i % 2) + half];
            const element *each = (const element *)&pair;
            x[2 * i] = to_float(each[0]), x[2 * i + 1] = to_float(each[1]);
        }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) { /* of the columns that other lanes have */
#pragma unroll
            for (int i = 0; i < C::K_DIM / 4; i++) {
                const float other = __shfl_xor_sync(0xffffffff, x[i], step);
                x[i] = lane & step ? other - x[i] : x[i] + other;
            }
        }
#pragma unroll
        for (int step = 1; step < C::K_DIM / 4; step *= 2) {
            if (step * 4 >= k_dim) break;
#pragma unroll
            for (int i = 0; i < C::K_DIM / 4; i++) {
                if (i & step) continue;
                const float a = x[i], b = x[i + step];
                x[i] = a + b;
                x[i + step] = a - b;
            }
        }
#pragma unroll
        for (int i = 0; i < C::K_DIM / 8; i++)
            q[i / 2][2 * (i % 2) + half] = pack_pair<element>(x[2 * i] * factor, x[2 * i + 1] * factor);
    }
}

#endif
