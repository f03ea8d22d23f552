/* Rows of packed codes as they come to shared memory: as they lie, in whole chunks of 16 bytes, of which the first
 * begins `phase` bytes before the row, an even number that is the same for all rows of a head. Who reads them takes
 * what lies before the row in its first chunk from the one behind the last, as if the row were a ring. */
#ifndef CPA_CUDA_PACKED_ROWS_CUH
#define CPA_CUDA_PACKED_ROWS_CUH

#include "kernels/cuda/attend/decode_loads.cuh"
#include "kernels/cuda/attend/mma.cuh"

constexpr int PACKED_DIM = 128, CHUNK = 16; /* columns of a head; bytes */

/* The chunks of a run of 16 rows as the lanes of a warp copy them, neighbouring ones at once. Bytes: of a row, with
 * what is behind its codes. Phased: rows begin anywhere; else with a chunk, of which there are 8, and these change
 * places so that the rows of a matrix lie in different banks. */
template <int Bytes, bool Phased>
struct packed_rows {
    static_assert(Phased || Bytes == 8 * CHUNK, "what changes places fills a row");
    static constexpr int CHUNKS = Phased ? (Bytes + 14 + CHUNK - 1) / CHUNK : Bytes / CHUNK;
    static constexpr int PITCH = (Phased ? CHUNKS | 1 : CHUNKS) * CHUNK;
    static constexpr int COPIES = (DECODE_RUN * CHUNKS + 31) / 32, RUN_BYTES = DECODE_RUN * PITCH;
    /* Whether a lane's chunks lie the same distance apart in the stage. */
    static constexpr bool EVEN = Phased && (PITCH == CHUNKS * CHUNK || 32 % CHUNKS == 0);
    static constexpr int STEP = 32 * PITCH / CHUNKS;
    static constexpr bool ALL_THERE = !Phased || Bytes > (CHUNKS - 1) * CHUNK; /* in any phase */
    int32_t from[COPIES];           /* from the run's first chunk; below 0: this lane has none to copy */
    uint32_t to[EVEN ? 1 : COPIES]; /* in the stage */

    static __device__ int row_of(int i, int lane) { return (32 * i + lane) / CHUNKS; }
    static __device__ int chunk_of(int i, int lane) { return (32 * i + lane) % CHUNKS; }

    __device__ packed_rows(int64_t token_bytes, uint32_t phase, int lane) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = row_of(i, lane), chunk = chunk_of(i, lane);
            const bool there = row < DECODE_RUN && chunk * CHUNK < (int)phase + Bytes;
            from[i] = there ? row * (int32_t)token_bytes + chunk * CHUNK : -1;
            if (!EVEN || i == 0) to[EVEN ? 0 : i] = row * PITCH + (Phased ? chunk : chunk ^ row % 8) * CHUNK;
        }
    }
    /* Has registers for what is the same for all runs. */
    __device__ void keep() {
        for (int32_t &x : from) x = kept<true>(x);
        for (uint32_t &x : to) x = kept<true>(x);
    }
    __device__ uint32_t place(int i, uint32_t stage) const {
        return stage + (EVEN ? to[0] + i * STEP : to[EVEN ? 0 : i]);
    }
    /* Copies chunk i, or zeros; none if this lane has none. */
    __device__ void copy(int i, const char *run, uint32_t stage, bool valid) const {
        const char *chunk = run + (uint32_t)from[i];
        const int bytes = valid ? CHUNK : 0;
        if (32 * (i + 1) <= DECODE_RUN * CHUNKS && ALL_THERE) {
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(i, stage)), "l"(chunk),
                         "r"(bytes));
        } else {
            asm volatile("{ .reg .pred there; setp.ge.s32 there, %3, 0;"
                         "@there cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(place(i, stage)),
                         "l"(chunk), "r"(bytes), "r"(from[i]));
        }
    }
    /* A run, of which the rows from `keys` on become zeros unless it is WHOLE. What is read of them, where rows lie
     * closer than their chunks, means nothing. */
    template <bool WHOLE>
    __device__ void load(const char *run, int32_t token_bytes, int keys, uint32_t stage) const {
        const uint32_t end = keys <= 0 ? 0 : (min(keys, DECODE_RUN) - 1) * token_bytes + CHUNKS * CHUNK;
#pragma unroll
        for (int i = 0; i < COPIES; i++) copy(i, run, stage, WHOLE || (uint32_t)from[i] < end);
    }
    /* Where a lane's row of ldmatrix lies: of the first and the second 8 keys, of a chunk and of the next. */
    static __device__ uint32_t matrix_row(int lane) {
        const int chunk = lane >> 4;
        return (lane % 8 + (lane >> 3 & 1) * 8) * PITCH + (Phased ? chunk : chunk ^ lane % 8) * CHUNK;
    }
    /* The same of chunks from an even one on. */
    static __device__ uint32_t matrix_at(uint32_t run, uint32_t row, int chunk) {
        return Phased ? run + row + chunk * CHUNK : (run + row) ^ chunk * CHUNK;
    }
};

/* Rows of whole tokens, Step bytes from head to head and Heads times that, whole chunks, from token to token. */
template <int Bytes, int Step, int Heads>
struct token_rows {
    static constexpr int CHUNKS = (Bytes + 14 + CHUNK - 1) / CHUNK, STEP = Step, PITCH = Heads * Step;
    static constexpr int RUN_BYTES = DECODE_RUN * PITCH;
    static_assert(PITCH % CHUNK == 0 && PITCH / CHUNK % 4 != 0, "few rows of a matrix lie in the same banks");

    static __device__ int matrix_row(int lane) {
        return (lane % 8 + (lane >> 3 & 1) * 8) * PITCH + (lane >> 4) * CHUNK;
    }
    static __device__ uint32_t matrix_at(uint32_t run, uint32_t row, int chunk) { return run + row + chunk * CHUNK; }
};

__device__ inline void load_two_matrices(uint32_t (&m)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(address)
                 : "memory");
}
__device__ inline uint32_t load_shared_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ inline uint32_t load_shared_half(uint32_t address) {
    uint16_t half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
    return half;
}

#endif
