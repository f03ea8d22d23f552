/* Values of packed codes as operands A of mma: rows are columns of the head, and the inner index runs over keys.
 * ldmatrix's transposition gives a lane a half word of codes of each of two neighbouring keys, for whom a mask cuts one
 * code out of both: in the lowest bits of fp16, where it is the number code * 2^(its first bit - 24), exactly. What is
 * common to all codes of a row, its scale, is part of the probabilities, and the least value is summed apart.
 *
 * Half words before the row in its first chunk are taken from the chunk behind the last (packed_rows.cuh). */
#ifndef CPA_CUDA_PACKED_VALUES_CUH
#define CPA_CUDA_PACKED_VALUES_CUH

#include "kernels/cuda/attend/packed_keys.cuh"

/* Each kind has
 *     rows        as they come to shared memory
 *     CODE_BYTES  of a row's codes
 *     PIECES      of a half word: codes, or parts of one
 *     cut         them, of a half word of two keys each; `at` is its chunk
 *     FACTOR(i)   by which the i-th is to be multiplied
 *     column      of the head, of the i-th of a half word of the row
 *     SHARED      its last piece may be part of a code whose other part is the first one of the next half word */
template <int BITS, template <int> class Rows = phased_rows>
struct turboquant_values;

template <template <int> class Rows>
struct turboquant_values<4, Rows> {
    static constexpr int CODE_BYTES = PACKED_DIM / 2, BYTES = CODE_BYTES + 4, PIECES = 4;
    using rows = Rows<BYTES>;
    static constexpr bool SHARED = false;

    __device__ turboquant_values(uint32_t, int) {}
    static __host__ __device__ constexpr float factor(int i) { return i % 2 ? 0x1p20f : 0x1p24f; }
    static __device__ int column(int half_word, int i) { return 4 * half_word + i; }
    __device__ void cut(uint32_t (&pieces)[PIECES], uint32_t word, int) const {
        pieces[0] = word & 0x000f000fu, pieces[1] = word & 0x00f000f0u;
        pieces[2] = word >> 8 & 0x000f000fu, pieces[3] = word >> 8 & 0x00f000f0u;
    }
};

/* Three half words are 16 codes: the h-th begins `skew` = h mod 3 bits before its first whole one. */
template <template <int> class Rows>
struct turboquant_values<3, Rows> {
    static constexpr int CODE_BYTES = PACKED_DIM * 3 / 8, BYTES = CODE_BYTES + 4, PIECES = 6;
    using rows = Rows<BYTES>;
    static constexpr int CODE_CHUNKS = CODE_BYTES / CHUNK;
    static constexpr bool SHARED = true;
    uint32_t skews; /* of this lane's half words, a byte for each chunk */

    __device__ turboquant_values(uint32_t phase, int lane) : skews(0) {
#pragma unroll
        for (int i = 0; i < CODE_CHUNKS; i++) skews |= (8 * i + lane / 4 + 24 - phase / 2) % 3 << 8 * i;
    }
    static __host__ __device__ constexpr float factor(int i) {
        return i % 3 == 0 ? 0x1p24f : i % 3 == 1 ? 0x1p21f : 0x1p18f;
    }
    static __device__ int column(int half_word, int i) { return (16 * half_word - half_word % 3) / 3 + i; }
    __device__ void cut(uint32_t (&pieces)[PIECES], uint32_t word, int chunk) const {
        uint32_t skew; /* found each time: registers are few */
        asm volatile("bfe.u32 %0, %1, %2, 8;" : "=r"(skew) : "r"(skews), "r"(8 * chunk));
        const uint32_t low = word << skew, high = word >> (9 - skew);
        pieces[0] = low & 0x00070007u & 0x00070007u << skew;
        pieces[1] = low & 0x00380038u, pieces[2] = low & 0x01c001c0u;
        pieces[3] = high & 0x00070007u, pieces[4] = high & 0x00380038u;
        pieces[5] = high & 0x01c001c0u & 0x01c001c0u >> (2 - skew);
    }
};

template <typename Codes>
struct byte_values {
    static constexpr int CODE_BYTES = PACKED_DIM, PIECES = 2;
    static constexpr bool SHARED = false;
    using rows = packed_rows<CODE_BYTES, false>;

    __device__ byte_values(uint32_t, int) {}
    static __host__ __device__ constexpr float factor(int) { return Codes::UNIT; }
    static __device__ int column(int half_word, int i) { return 2 * half_word + i; }
    __device__ void cut(uint32_t (&pieces)[PIECES], uint32_t word, int) const {
        Codes::cut(word, pieces[0], pieces[1]);
    }
};

/* O of a warp: tiles of 16 columns, of the pieces 2 i and 2 i + 1 of a chunk's half words. */
template <typename Values>
struct packed_sums {
    using values = Values;
    using rows = typename values::rows;
    static constexpr int CODE_CHUNKS = values::CODE_BYTES / CHUNK, PAIRS = values::PIECES / 2,
                         TILES = CODE_CHUNKS * PAIRS;
    const values codes;
    uint32_t at, half_words; /* half_words: before the row, in its first chunk */
    bool behind;             /* this lane's half word of the first chunk lies before the row */

    __device__ packed_sums(uint32_t phase, int lane)
        : codes(phase, lane), at(rows::matrix_row(lane)), half_words(phase / 2), behind(lane / 4 < (int)phase / 2) {}

    /* o += V^T P^T for 16 keys; p: operands B of the columns of queries. */
    template <int QUERIES>
    __device__ void add(float (&o)[QUERIES][TILES][4], const uint32_t (&p)[QUERIES][2], uint32_t keys) const {
        uint32_t of_last[2];
        if constexpr (rows::CHUNKS > CODE_CHUNKS)
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                         : "=r"(of_last[0]), "=r"(of_last[1])
                         : "r"(keys + at + CODE_CHUNKS * CHUNK)
                         : "memory");
#pragma unroll
        for (int two = 0; two < CODE_CHUNKS; two += 2) {
            uint32_t words[4];
            load_matrices_transposed(words, rows::matrix_at(keys, at, two));
            if (rows::CHUNKS > CODE_CHUNKS && two == 0 && behind) words[0] = of_last[0], words[1] = of_last[1];
#pragma unroll
            for (int chunk = two; chunk < two + 2 && chunk < CODE_CHUNKS; chunk++) {
                uint32_t low[values::PIECES], high[values::PIECES];
                codes.cut(low, words[2 * (chunk - two)], chunk);
                codes.cut(high, words[2 * (chunk - two) + 1], chunk);
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    const uint32_t a[4] = {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
#pragma unroll
                    for (int q = 0; q < QUERIES; q++) mma<__half>(o[q][chunk * PAIRS + i], a, p[q][0], p[q][1]);
                }
            }
        }
    }
    /* The columns of a query to shared memory, if it is `there`; worth: that of O; least: what all of them have
     * beside. e: which of the lane's two. Called by all lanes. */
    __device__ void store(float *row, bool there, const float (&o)[TILES][4], int e, float worth, float least,
                          int lane) const {
        constexpr int LAST = values::PIECES - 1;
        float shared[CODE_CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CODE_CHUNKS; chunk++) {
            const int half_word = half_word_of(chunk, lane);
#pragma unroll
            for (int i = 0; i < values::PIECES; i++) {
                const float x = o[chunk * PAIRS + i / 2][i % 2 * 2 + e] * (values::factor(i) * worth);
                if (values::SHARED && i == LAST && half_word % 3 != 2) {
                    shared[chunk] = x;
                } else if (there) {
                    row[values::column(half_word, i)] = x + least;
                }
            }
        }
        if constexpr (values::SHARED) {
            __syncwarp();
#pragma unroll
            for (int chunk = 0; chunk < CODE_CHUNKS; chunk++) {
                const int half_word = half_word_of(chunk, lane);
                if (there && half_word % 3 != 2) row[values::column(half_word, LAST)] += shared[chunk];
            }
        }
    }
    /* That of the row which this lane has of a chunk. */
    __device__ int half_word_of(int chunk, int lane) const {
        const int at = 8 * chunk + lane / 4 - (int)half_words;
        return at < 0 ? at + 8 * CODE_CHUNKS : at;
    }
};

#endif
