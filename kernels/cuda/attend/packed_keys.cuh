/* Keys of packed codes as operands A of mma (mma.cuh), whose rows are then 16 keys and whose columns of B are queries:
 * a group of 8 query heads or fewer fills it.
 *
 * ldmatrix gives lane c of a quad the c-th word of each chunk of a row (packed_rows.cuh). The inner product has no
 * order, so that no code is moved: what lies in a word tells which dims of the queries it meets. */
#ifndef CPA_CUDA_PACKED_KEYS_CUH
#define CPA_CUDA_PACKED_KEYS_CUH

#include "kernels/cuda/attend/packed_rows.cuh"
#include "kernels/cuda/cache/turboquant.cuh"

/* Two centroids for each byte that two codes fill: entry i of lane l lies at 256 i + 4 l, where byte_perm of i and l
 * points, and no two lanes meet in a bank. Behind each entry's 32 words as many lie idle. */
constexpr int CENTROID_PAIRS_BYTES = 256 * 256;

template <int BITS>
__device__ void fill_centroid_pairs(char *pairs, int thread, int threads) {
    constexpr int ENTRIES = 1 << (2 * BITS);
    for (int i = thread; i < ENTRIES * 8; i += threads) {
        const int first = i / 8 % (1 << BITS), second = i / 8 >> BITS;
        const uint32_t pair = pack_pair<__half>(tq_centroid(BITS, first), tq_centroid(BITS, second));
        *(uint4 *)(pairs + i / 8 * 256 + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
}
/* They begin the shared memory of the CTA, as whose own they are read: with that address in a uniform register. */
__device__ inline uint32_t centroid_pair(uint32_t offset) {
    extern __shared__ __align__(128) char shared[];
    return *(const uint32_t *)(shared + offset);
}

/* What a lane knows of a head's keys. Each kind has
 *     rows       as they come to shared memory
 *     dim        the first of the two dims of its pair `pair` of a step of 16
 *     score      the products of 16 keys with the queries' columns: s [tiles of 8 queries][C of mma]; and the sums of
 *                the squares of keys r and r + 8, if they are SQUARED */
template <int Bytes>
using phased_rows = packed_rows<Bytes, true>;
template <int BITS, template <int> class Rows = phased_rows>
struct turboquant_keys;

/* The two chunks from chunk `first` on, of keys r and r + 8 in turn; CODES chunks make a row. */
template <typename Rows, int CODES>
__device__ void load_ring(uint32_t (&words)[4], uint32_t keys, uint32_t row, int first, uint32_t behind) {
    load_matrices(words, Rows::matrix_at(keys, row, first));
    if (first > 0 || Rows::CHUNKS == CODES) return;
    uint32_t last[2];
    load_two_matrices(last, keys + row + CODES * CHUNK);
    words[0] = (words[0] & ~behind) | (last[0] & behind);
    words[1] = (words[1] & ~behind) | (last[1] & behind);
}

/* Bits of this lane's word of the first chunk that lie before the row. */
__device__ inline uint32_t bits_before(uint32_t phase, int lane) {
    const int bits = min(max((int)phase - lane % 4 * 4, 0), 4) * 8;
    return bits == 32 ? 0xffffffff : (1u << bits) - 1;
}

/* c = a b, or c += a b. */
__device__ inline void mma_from(bool zero, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (!zero) return mma<__half>(c, a, b0, b1);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
template <int TILES, typename Queries>
__device__ void multiply_keys(float (&s)[TILES][4], const uint32_t (&keys)[4], const Queries &q, int step) {
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_from(step == 0, s[t], keys, q.pair_of(t, step, 0), q.pair_of(t, step, 1));
}
/* Sums of the squares of 16 keys' elements: of eight pairs at a time by the lane itself, in fp16, whose error of some
 * 1e-4 is below that of the queries; then of all, by a product with ones. */
struct key_squares {
    uint32_t pairs[4];

    __device__ void add(const uint32_t (&keys)[4], int step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (step == 0) {
                asm("mul.rn.f16x2 %0, %1, %1;" : "=r"(pairs[i]) : "r"(keys[i]));
            } else {
                asm("fma.rn.f16x2 %0, %1, %1, %0;" : "+r"(pairs[i]) : "r"(keys[i]));
            }
        }
    }
    /* Of keys r and r + 8. */
    __device__ void sum(float (&squares)[2]) const {
        constexpr uint32_t ONES = 0x3c003c00u;
        float all[4];
        mma_from(true, all, pairs, ONES, ONES);
        squares[0] = all[0], squares[1] = all[2];
    }
};

/* Codes of a byte as fp16, whose UNIT-fold they are: four neighbouring ones of a key, and two columns' of two values
 * each. Those of int8 are offset by 128, and their zero is left to what is done with sums of them. */
struct e4m3_bytes {
    static constexpr float UNIT = 1;
    static constexpr bool HAS_ZERO = false;
    static __device__ void widen(uint32_t four, uint32_t &low, uint32_t &high) {
        e4m3_codes::widen(four, 0, low, high);
    }
    static __device__ void cut(uint32_t four, uint32_t &first, uint32_t &second) {
        e4m3_codes::widen(__byte_perm(four, 0, 0x3120), 0, first, second);
    }
};
struct int8_bytes {
    static constexpr float UNIT = 0x1p24f;
    static constexpr bool HAS_ZERO = true;
    static __device__ void widen(uint32_t four, uint32_t &low, uint32_t &high) {
        const uint32_t offset = four ^ 0x80808080u;
        low = __byte_perm(offset, 0, 0x4140);
        high = __byte_perm(offset, 0, 0x4342);
    }
    static __device__ void cut(uint32_t four, uint32_t &first, uint32_t &second) {
        const uint32_t offset = four ^ 0x80808080u;
        first = __byte_perm(offset, 0, 0x4240);
        second = __byte_perm(offset, 0, 0x4341);
    }
};

/* Codes of a byte, in rows that begin anywhere or not. */
template <typename Codes, bool Phased>
struct byte_keys {
    static constexpr bool SQUARED = false;
    static constexpr int CODE_CHUNKS = PACKED_DIM / CHUNK;
    using rows = packed_rows<PACKED_DIM, Phased>;
    uint32_t at, behind;

    __device__ byte_keys(uint32_t phase, int lane)
        : at(rows::matrix_row(lane)), behind(bits_before(phase, lane)) {}
    static __device__ int dim(int step, int pair, uint32_t phase, int lane) {
        return (16 * step + 4 * (lane % 4) + 2 * pair - (int)phase) & (PACKED_DIM - 1);
    }
    template <int TILES, typename Queries>
    __device__ void score(float (&s)[TILES][4], float (&)[2], const Queries &q, uint32_t keys) const {
#pragma unroll
        for (int first = 0; first < CODE_CHUNKS; first += 2) {
            uint32_t words[4];
            load_ring<rows, CODE_CHUNKS>(words, keys, at, first, behind);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t a[4];
                Codes::widen(words[2 * i], a[0], a[2]);
                Codes::widen(words[2 * i + 1], a[1], a[3]);
                multiply_keys<TILES>(s, a, q, first + i);
            }
        }
    }
};

template <>
struct turboquant_keys<8, phased_rows> : byte_keys<e4m3_bytes, true> {
    using byte_keys::byte_keys;
};

template <template <int> class Rows>
struct turboquant_keys<4, Rows> {
    static constexpr int BITS = 4, CODE_BYTES = PACKED_DIM / 2, BYTES = CODE_BYTES + 2;
    static constexpr bool SQUARED = true;
    using rows = Rows<BYTES>;
    uint32_t at, behind, column;

    __device__ turboquant_keys(uint32_t phase, int lane)
        : at(rows::matrix_row(lane)), behind(bits_before(phase, lane)), column(lane * 4) {}
    static __device__ int dim(int step, int pair, uint32_t phase, int lane) {
        return (32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * pair - 2 * (int)phase) & (PACKED_DIM - 1);
    }
    template <int BYTE>
    __device__ uint32_t pair_of(uint32_t word) const {
        return centroid_pair(__byte_perm(word, column, 0x5504 | BYTE << 4));
    }
    template <int TILES, typename Queries>
    __device__ void score(float (&s)[TILES][4], float (&squares)[2], const Queries &q, uint32_t keys) const {
        key_squares of_codes;
#pragma unroll
        for (int first = 0; first < CODE_BYTES / CHUNK; first += 2) {
            uint32_t words[4];
            load_ring<rows, CODE_BYTES / CHUNK>(words, keys, at, first, behind);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t low = words[2 * i], high = words[2 * i + 1];
                const uint32_t a[2][4] = {{pair_of<0>(low), pair_of<0>(high), pair_of<1>(low), pair_of<1>(high)},
                                          {pair_of<2>(low), pair_of<2>(high), pair_of<3>(low), pair_of<3>(high)}};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    multiply_keys<TILES>(s, a[half], q, 2 * (first + i) + half);
                    of_codes.add(a[half], 2 * (first + i) + half);
                }
            }
        }
        of_codes.sum(squares);
    }
};

/* A lane has 32 neighbouring codes, 12 bytes. */
template <template <int> class Rows>
struct turboquant_keys<3, Rows> {
    static constexpr int BITS = 3, CODE_BYTES = PACKED_DIM * 3 / 8, BYTES = CODE_BYTES + 2, WORDS = 3;
    static constexpr bool SQUARED = true;
    using rows = Rows<BYTES>;
    uint32_t at, shift, column; /* shift: bits before the first code in its word */

    __device__ turboquant_keys(uint32_t phase, int lane)
        : at(lane / 4 * rows::PITCH + (phase & ~3u) + lane % 4 * (WORDS * 4)), shift(8 * (phase & 2)),
          column(lane * 4) {}
    static __device__ int dim(int step, int pair, uint32_t, int lane) {
        return 32 * (lane % 4) + 4 * step + 2 * pair;
    }
    __device__ void load_codes(uint32_t (&codes)[WORDS], uint32_t from) const {
        uint32_t words[WORDS + 1];
#pragma unroll
        for (int i = 0; i <= WORDS; i++) words[i] = load_shared_word(from + 4 * i);
#pragma unroll
        for (int i = 0; i < WORDS; i++) codes[i] = __funnelshift_r(words[i], words[i + 1], shift);
    }
    /* Codes 2 n and 2 n + 1. */
    __device__ uint32_t pair_of(const uint32_t (&codes)[WORDS], int n) const {
        const int word = 6 * n / 32, bit = 6 * n % 32;
        const uint32_t high = bit < 8    ? codes[word] << (8 - bit)
                              : bit < 27 ? codes[word] >> (bit - 8)
                                         : __funnelshift_r(codes[word], codes[(word + 1) % WORDS], bit - 8);
        return centroid_pair((high & 0x3f00) | column);
    }
    template <int TILES, typename Queries>
    __device__ void score(float (&s)[TILES][4], float (&squares)[2], const Queries &q, uint32_t keys) const {
        key_squares of_codes;
        uint32_t low[WORDS], high[WORDS];
        load_codes(low, keys + at);
        load_codes(high, keys + at + 8 * rows::PITCH);
#pragma unroll
        for (int step = 0; step < 8; step++) {
            const uint32_t a[4] = {pair_of(low, 2 * step), pair_of(high, 2 * step), pair_of(low, 2 * step + 1),
                                   pair_of(high, 2 * step + 1)};
            multiply_keys<TILES>(s, a, q, step);
            of_codes.add(a, step);
        }
        of_codes.sum(squares);
    }
};

#endif
