/* Tiles of attend_latent_few.cu, and the products of a warp with what lies there: B of mma.sync is read as it lies in
 * the cache, and made of it in registers.
 *
 * Which column is which of a product is free, as long as both sides say the same. Of scores a lane has columns of one
 * key that lie side by side, four a step. Of values it has 8 columns side by side of each of four keys, and column i of
 * all of them is those of the i-th product. */
#ifndef CPA_CUDA_LATENT_FEW_CUH
#define CPA_CUDA_LATENT_FEW_CUH

#include "kernels/cuda/attend/latent_tiles.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/cache/quant.cuh"

namespace {

constexpr int ROWS = 16; /* of a CTA, those of mma.sync */
/* Two teams of warps take the tiles in turn, so that one multiplies while the other is at its softmax. */
constexpr int TEAMS = 2, MEMBERS = 8, TEAM = 32 * MEMBERS;
/* Scores: a warp has those of half of a tile's keys, as far as a quarter of the columns goes. */
constexpr int QUARTERS = 4, KEY_TILES = MEMBERS / 2; /* tiles of 8 keys that it has */
constexpr int QUARTER = 128, LATENT_COLUMNS = 512, LAST_COLUMNS = 16, QUERY_STEPS = (QUARTER + LAST_COLUMNS) / 16;
constexpr int LANE_COLUMNS = 8; /* of values */

template <typename Element, latent_cache Cache>
struct few_config {
    using element = Element;
    static constexpr latent_cache CACHE = Cache;
    static constexpr bool TILED = Cache == LATENT_TILED_CODES, CODES = TILED || Cache == LATENT_CODES;
    /* Of keys and values in products. Codes are exact in fp16; with scales they stand for elements. */
    using key = typename std::conditional<Cache == LATENT_CODES, __half, Element>::type;
    static constexpr bool HALVES = std::is_same<key, __half>::value;
    /* Probabilities in fp16 are times so many powers of two, which uses its range: they are 1 at most. */
    static constexpr float SHIFT = HALVES ? 15 : 0;
    static constexpr int KEYS = 64;
    static constexpr int LAST_AT = !CODES ? 2 * LATENT_COLUMNS : LATENT_COLUMNS + (TILED ? QUARTERS * 4 : 0);
    static constexpr int LAST_BYTES = (Cache == LATENT_CODES ? 1 : 2) * LAST_COLUMNS; /* of a quarter */
    static constexpr int ROW_BYTES = LAST_AT + QUARTERS * LAST_BYTES;
    /* Rows are 4 or 20 banks apart from the one before, of 32. */
    static constexpr int PITCH = ROW_BYTES + (TILED ? 0 : 16);
    static_assert(PITCH / 4 % 16 == 4, "reads of different rows use different banks");
    static constexpr int STAGE_BYTES = KEYS * PITCH, STAGES = CODES ? 4 : 2;
    static_assert(STAGES % TEAMS == 0, "a stage is one team's: the other would not know which of its phases it sees");
    /* Scores as far as each quarter of the columns goes, those of the second team behind those of the first; where these
     * are, what that team hands on in the end; probabilities. */
    static constexpr int QUARTERS_BYTES = KEYS * ROWS * QUARTERS * 4, HANDED_BYTES = ROWS * LATENT_COLUMNS * 4;
    static constexpr int P_PITCH = KEYS * 2 + 16, P_BYTES = ROWS * P_PITCH;
    static constexpr int QUARTERS_AT = STAGES * STAGE_BYTES, HANDED_AT = QUARTERS_AT + QUARTERS_BYTES,
                         P_AT = HANDED_AT + HANDED_BYTES, SHARED_BYTES = P_AT + TEAMS * P_BYTES;
    /* Four warps bring rows; registers change hands by fours. */
    static constexpr int LOADERS = WARPGROUP / 32, THREADS = TEAMS * TEAM + WARPGROUP;
    static constexpr int LOADER_REGISTERS = 32, TEAM_REGISTERS = 112, LAUNCH_REGISTERS = 96;
    static_assert(WARPGROUP * LOADER_REGISTERS + TEAMS * TEAM * TEAM_REGISTERS <= THREADS * LAUNCH_REGISTERS, "a CTA's");
};

/* Where a warp of a team stands, and a lane of it in products. */
struct few_place {
    int team, member, lane;
    __device__ int half() const { return member / QUARTERS; }
    __device__ int quarter() const { return member % QUARTERS; }
    __device__ int row() const { return lane / 4; } /* of A and C, and that 8 on; of B the column */
    __device__ int quad() const { return lane % 4; }
    __device__ int thread() const { return 32 * member + lane; }
};

__device__ inline uint4 read_16(uint32_t from) {
    uint4 to;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(from)
                 : "memory");
    return to;
}
__device__ inline uint2 read_8(uint32_t from) {
    uint2 to;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "r"(from) : "memory");
    return to;
}
__device__ inline uint32_t read_4(uint32_t from) {
    uint32_t to;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
    return to;
}
__device__ inline float read_float(uint32_t from) {
    return __uint_as_float(read_4(from));
}
__device__ inline float4 read_floats(uint32_t from) {
    const uint4 bits = read_16(from);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
}
__device__ inline void write_floats(uint32_t to, const float (&from)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]),
                 "f"(from[3])
                 : "memory");
}

/* Pairs of codes in fp16, with the scales of the first and of the second of each, as the elements that they stand for. */
template <typename C>
__device__ void scale_pairs(uint32_t (&pairs)[2], float first, float second) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 pair = __half22float2(bits_pair(pairs[i]));
        pairs[i] = pack_pair<typename C::element>(pair.x * first, pair.y * second);
    }
}

/* ---- scores ---- */

/* The queries of a lane's two rows as A, as far as its warp's quarter of the columns goes. Over codes in fp16 they are
 * in fp16 too, and times a power of two that makes the largest of a row's quarter as large as fp16 has it: `factor`
 * undoes that. */
template <typename C>
struct few_queries {
    uint32_t a[QUERY_STEPS][4];
    float factor[2];

    /* The first of the four columns that a lane has of a step. Of elements a lane's chunks of 16 bytes come in such an
     * order that lanes which read together use different banks. */
    static __device__ int column(const few_place &at, int step) {
        if (step == QUERY_STEPS - 1) return LATENT_COLUMNS + at.quarter() * LAST_COLUMNS + 4 * at.quad();
        const int chunk = C::CODES ? step / 2 : step / 2 ^ (at.quad() & 2);
        return at.quarter() * QUARTER + at.quad() * (QUARTER / 4) + chunk * 8 + step % 2 * 4;
    }
    __device__ void load(const cpa_cuda_attend_args &args, const cpa_cuda_piece &piece, int kv_head,
                         const few_place &at) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = piece.row_begin + at.row() + 8 * half;
            const bool valid = row < piece.row_end;
            const row_place place(args, piece.q_row, valid ? row : piece.row_begin, kv_head);
            const char *q =
                queries_of(args, piece) + (place.state_row * args.q_row_stride + place.head * args.q_head_stride) * 2;
#pragma unroll
            for (int step = 0; step < QUERY_STEPS; step++) {
                const uint2 four = valid ? *(const uint2 *)(q + column(at, step) * 2) : make_uint2(0, 0);
                a[step][half] = four.x, a[step][half + 2] = four.y;
            }
            factor[half] = 1;
            if (C::CACHE == LATENT_CODES) narrow(half);
        }
    }
    __device__ static float2 pair_of(uint32_t bits) {
        const typename C::element *pair = (const typename C::element *)&bits;
        return make_float2(to_float(pair[0]), to_float(pair[1]));
    }
    __device__ void narrow(int half) {
        float largest = 0;
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; step++)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                const float2 pair = pair_of(a[step][i]);
                if (fabsf(pair.x) < INFINITY) largest = fmaxf(largest, fabsf(pair.x));
                if (fabsf(pair.y) < INFINITY) largest = fmaxf(largest, fabsf(pair.y));
            }
        /* From 2^14 on, which is the exponent 141 of a float; no power is out of the range of floats. */
        constexpr uint32_t TOP = 127 + 14, LEAST = 15;
        const uint32_t exponent = max(__float_as_uint(quad_max(largest)) >> 23, LEAST);
        const float up = __uint_as_float((TOP + 127 - exponent) << 23);
        factor[half] = __uint_as_float((exponent + 127 - TOP) << 23);
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; step++)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                const float2 pair = pair_of(a[step][i]);
                a[step][i] = pack_pair<__half>(pair.x * up, pair.y * up);
            }
    }

    /* A step with four columns of the lane's key, as codes; scale: of CPA_FP8_T128. */
    __device__ void add_codes(float (&s)[4], int step, uint32_t four, float scale) const {
        uint32_t pairs[2];
        e4m3_codes::widen(four, 0, pairs[0], pairs[1]);
        if (C::TILED) scale_pairs<C>(pairs, scale, scale);
        mma<typename C::key>(s, a[step], pairs[0], pairs[1]);
    }
    /* The scores of 8 keys each of TILES neighbouring tiles, of which `key` is the lane's of the first: steps of
     * different tiles do not wait for one another. */
    template <int TILES>
    __device__ void multiply(float (&s)[TILES][4], uint32_t key, const few_place &at) const {
        constexpr int BYTES = C::CODES ? 1 : 2, CHUNKS = QUARTER / 4 * BYTES / 16, NEXT = 8 * C::PITCH;
        const uint32_t from = key + (at.quarter() * QUARTER + at.quad() * (QUARTER / 4)) * BYTES;
        const uint32_t last = key + C::LAST_AT + at.quarter() * C::LAST_BYTES + at.quad() * (C::LAST_BYTES / 4);
        float scale[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
            scale[i] = C::TILED ? read_float(key + i * NEXT + LATENT_COLUMNS + 4 * at.quarter()) : 1;
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            uint4 words[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++)
                words[i] = read_16(from + i * NEXT + (C::CODES ? chunk : chunk ^ (at.quad() & 2)) * 16);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const uint32_t low = half ? words[i].z : words[i].x, high = half ? words[i].w : words[i].y;
                    if constexpr (C::CODES) {
                        add_codes(s[i], 4 * chunk + 2 * half, low, scale[i]);
                        add_codes(s[i], 4 * chunk + 2 * half + 1, high, scale[i]);
                    } else {
                        mma<typename C::key>(s[i], a[2 * chunk + half], low, high);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if constexpr (C::CACHE == LATENT_CODES) {
                add_codes(s[i], QUERY_STEPS - 1, read_4(last + i * NEXT), 1);
#pragma unroll
                for (int e = 0; e < 4; e++) s[i][e] *= factor[e / 2];
            } else {
                const uint2 words = read_8(last + i * NEXT);
                mma<typename C::key>(s[i], a[QUERY_STEPS - 1], words.x, words.y);
            }
        }
    }
};

/* ---- values ---- */

/* 8 columns of a key. */
template <typename C>
struct few_values {
    uint32_t words[C::CODES ? 2 : 4];
    float scale; /* of CPA_FP8_T128 */

    __device__ few_values(uint32_t key, int column) : scale(1) {
        if constexpr (C::CODES) {
            const uint2 eight = read_8(key + column);
            words[0] = eight.x, words[1] = eight.y;
            if constexpr (C::TILED) scale = read_float(key + LATENT_COLUMNS + column / QUARTER * 4);
        } else {
            const uint4 eight = read_16(key + 2 * column);
            words[0] = eight.x, words[1] = eight.y, words[2] = eight.z, words[3] = eight.w;
        }
    }
};

/* Of two neighbouring keys, as pairs, the columns 2 i and 2 i + 1. */
template <typename C>
__device__ void pair_up(uint32_t (&pairs)[2], const few_values<C> &even, const few_values<C> &odd, int i) {
    if constexpr (!C::CODES) {
        pairs[0] = __byte_perm(even.words[i], odd.words[i], 0x5410);
        pairs[1] = __byte_perm(even.words[i], odd.words[i], 0x7632);
    } else {
        const uint32_t four = __byte_perm(even.words[i / 2], odd.words[i / 2], i % 2 ? 0x7362 : 0x5140);
        e4m3_codes::widen(four, 0, pairs[0], pairs[1]);
        if (C::TILED) scale_pairs<C>(pairs, even.scale, odd.scale);
    }
}

/* O += P V of a tile, of the warp's columns of values: o[i] are those of the i-th product. */
template <typename C>
__device__ void add_values(float (&o)[LANE_COLUMNS][4], uint32_t tile, uint32_t p, const few_place &at) {
    const int column = (at.member * 8 + at.row()) * LANE_COLUMNS;
    const uint32_t p_at = p + (at.lane & 15) * C::P_PITCH + at.lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < C::KEYS / 16; step++) {
        const uint32_t key = tile + (16 * step + 2 * at.quad()) * C::PITCH;
        const few_values<C> v[4] = {{key, column},
                                    {key + C::PITCH, column},
                                    {key + 8 * C::PITCH, column},
                                    {key + 9 * C::PITCH, column}};
        uint32_t a[4];
        load_matrices(a, p_at + 32 * step);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) {
            uint32_t near[2], far[2];
            pair_up<C>(near, v[0], v[1], i);
            pair_up<C>(far, v[2], v[3], i);
            mma<typename C::key>(o[2 * i], a, near[0], far[0]);
            mma<typename C::key>(o[2 * i + 1], a, near[1], far[1]);
        }
    }
}

} // namespace

#endif
