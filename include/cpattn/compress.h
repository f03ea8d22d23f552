/* Operators of attention over compressed entries (DeepSeek-V4): rows of 512 that are key and value at once, of which
 * the last 64 are rotated, one for each token of a sliding window and one for each `ratio` tokens of what lies before.
 *
 * Pointers lie on the stream's device and are aligned to their elements. Strides are from row to row, in elements, 0
 * for contiguous rows. All arithmetic is fp32, each operation rounded by itself in the order that is given, so that a
 * row has the same bits on every device, in any batch and any place of it:
 *
 *     sum       of 2^k numbers: of neighbours, of the sums of neighbours, and so on until one is left
 *     norm      RMSNorm (arXiv:1910.07467), y = x * (1 / sqrt(sum(x^2) / n + eps)), then times the weight
 *     rotation  cpa_rope of cpattn/nn.h: pairs (2 i, 2 i + 1), `interleaved` 1, from an even `first` on; products are
 *               rounded before they are added. A position outside of the table gives a row of NaN
 *     e^x       2^n p(r), n = x log2(e) rounded to nearest, r = x - n ln(2) with ln(2) in two parts, p Taylor's series
 *               to the seventh power; 0 below x = -87: within 2 units in the last place
 *     power     of a largest magnitude m and a floor f: the least power of two that is not below max(m, f) / 448.
 *               Infinities and NaN take no part in m
 *
 * Nothing is allocated and no call synchronises; calls on several streams may run at once. A status other than CPA_OK
 * means that nothing was enqueued, and cpa_stream_error tells why. `size` is sizeof the struct. No rows is no error. */
#ifndef CPATTN_COMPRESS_H
#define CPATTN_COMPRESS_H

#include <cpattn/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Elements of a head, and of an entry. */
#define CPA_ENTRY_DIM 512

/* Where entries go: a cache of latents with one KV head and v_dim = k_dim, whose rows lie in one piece and whose dtype
 * is CPA_FP8_T64, CPA_BF16 or CPA_FP8_E4M3. A row is rounded to bf16 and from there written as cpa_kv_write would; but
 * a row of CPA_FP8_E4M3 without k_scale has a power of two, of the floor 1e-4, as its scale. A slot that is negative
 * skips its token; one beyond the cache is refused, on CUDA when the stream is synchronised. */

/* inverse_rope_quant (known elsewhere as fused_inv_rope_fp8_quant): results of attention, rotated back and as codes,
 * for a product by groups of heads. Each 128 elements have e4m3 of x / s, x not rounded before, s the power of their
 * largest magnitude with the floor 1e-10. Under context parallel the owner of a row calls it, after the last merge. */
typedef struct cpa_inverse_rope_quant_args {
    size_t size;
    int64_t rows;
    int32_t heads, groups; /* heads is a multiple of groups */
    cpa_dtype dtype;
    const void *o;            /* [rows, heads, 512] */
    int64_t o_stride;         /* a multiple of 16 bytes, as o is */
    cpa_rope rope;            /* as it turned the queries: it is undone; `inverse` is 0 */
    const int64_t *positions; /* [rows] */
    void *codes;              /* [groups, rows, heads / groups * 512] */
    /* [groups, heads / groups * 4, rows up to a multiple of 4] fp32, filled up with 0; or packed, [groups, heads /
     * groups, rows up to a multiple of 4] words of four exponents each (UE8M0), the first in the lowest byte. */
    void *scales;
    int32_t packed;
} cpa_inverse_rope_quant_args;
CPA_API cpa_status cpa_inverse_rope_quant(const cpa_inverse_rope_quant_args *args, cpa_stream *stream);

/* What a compressor keeps of tokens until the last one of an entry is there: a pool of blocks of rows, each of [width
 * keys | width scores], width = head, or with overlap 2 * head, the first half for the entry behind the token's own and
 * the second for its own. */
typedef struct cpa_compress_state {
    float *rows; /* [num_blocks, block_size, 2 * width], at a multiple of 16 bytes */
    int64_t num_blocks;
    int32_t block_size; /* at least 1 */
    int32_t ratio;      /* tokens of an entry, 1 to CPA_COMPRESS_MOST_RATIO */
    int32_t overlap;    /* 1: an entry is made of the tokens of the one before it as well */
    int32_t head;       /* 128, 256 or 512 */
    int32_t reserved[8];
} cpa_compress_state;
enum { CPA_COMPRESS_MOST_RATIO = 128 };

/* compress_state_write: the rows of new tokens: kv, and score + ape[position % ratio]. A slot that is negative skips
 * its token, one beyond the pool is refused as above. */
typedef struct cpa_compress_state_write_args {
    size_t size;
    int64_t tokens;
    cpa_compress_state state;
    const float *kv, *score; /* [tokens, width], at multiples of 16 bytes, as their strides */
    int64_t kv_stride, score_stride;
    const float *ape;                 /* [ratio, width], at a multiple of 16 bytes */
    const int64_t *positions, *slots; /* [tokens]; slots of the state: block * block_size + offset */
} cpa_compress_state_write_args;
CPA_API cpa_status cpa_compress_state_write(const cpa_compress_state_write_args *args, cpa_stream *stream);

/* compress_write (known elsewhere as fused_compress_quant_cache): of each token at a position p with p + 1 a multiple
 * of ratio, the entry of which it is the last one. Its window is the tokens of the last ratio positions, with overlap
 * of the last 2 * ratio, those below 0 left out; of these the first ratio give the first half of their rows, the others
 * the second. Then, in this order, m being the largest score of a channel, and a sum over the window (s_0 + s_1) + (s_2
 * + s_3) with s_i that of its rows w with w % 4 = i, ascending, from 0 on:
 *
 *     e_w = e^(score_w - m),  d = the sum of e_w,  c = the sum of (e_w / d) * kv_w
 *     norm with weight over the head, rotation at the position p + 1 - ratio, the cache
 *
 * The row of the token at position q lies in the pool where the tables say: entry `index of q / block_size` of its
 * sequence. The index of the token is given, and those of its window are the ones in front: positions, or under context
 * parallel indices of what the rank owns, whose runs are then a multiple of ratio. There, with overlap, the first half
 * of the window of a run's first entry lies on another rank: halo_slots names the halo that has it, ratio rows of [head
 * keys | head scores], the first half of a state's rows.
 *
 * All other tokens are left alone, and those whose slot is negative. Sequences, table entries and halo slots out of
 * range are refused as slots are. */
typedef struct cpa_compress_write_args {
    size_t size;
    int64_t tokens;
    cpa_compress_state state;
    const int64_t *positions; /* [tokens] */
    const int64_t *indices;   /* [tokens]; NULL: the positions */
    const int32_t *sequences; /* [tokens]: lines of tables */
    const int32_t *tables;    /* [n_sequences, table_stride] */
    int64_t n_sequences;
    int64_t table_stride; /* entries of a line, at least 1 */
    const float *halo;    /* [n_halos, ratio, 2 * head], at a multiple of 16 bytes; NULL: there is none */
    int64_t n_halos;
    const int32_t *halo_slots; /* [tokens], negative: the window lies in the pool; NULL: all do */
    const float *weight;       /* [head], at a multiple of 16 bytes */
    float eps;
    cpa_rope rope;        /* of the head */
    const int64_t *slots; /* [tokens], of the cache */
    cpa_kv_view kv;       /* k_dim = head */
    /* Not NULL: entries go here as MXFP4 instead, each rounded to bf16 and from there to codes and exponents as
     * those of cpa_index_q (cpattn/indexer.h): row `slot` of [mxfp4_rows, head / 2], at a multiple of 4 bytes, and
     * of [mxfp4_rows, head / 32]. kv.k is NULL then. */
    uint8_t *mxfp4, *mxfp4_scales;
    int64_t mxfp4_rows;
} cpa_compress_write_args;
CPA_API cpa_status cpa_compress_write(const cpa_compress_write_args *args, cpa_stream *stream);

/* compress_halo_pack: halos for other ranks, of rows that have been written: the first half of each row of a state with
 * overlap, keys and then scores. A slot that is negative, or beyond the pool, gives a row of NaN. */
typedef struct cpa_compress_halo_pack_args {
    size_t size;
    int64_t halos;
    cpa_compress_state state; /* overlap is 1 */
    const int64_t *slots;     /* [halos, ratio] */
    float *out;               /* [halos, ratio, 2 * head], at a multiple of 16 bytes */
} cpa_compress_halo_pack_args;
CPA_API cpa_status cpa_compress_halo_pack(const cpa_compress_halo_pack_args *args, cpa_stream *stream);

/* q_norm_rope_kv_write: the rows of a layer's new tokens before attention: each head of queries is normed, without a
 * weight, rotated and rounded to dtype; the token's own row is rotated, rounded to dtype and written to the cache of
 * the sliding window. Heads beyond those of q are zeros. */
typedef struct cpa_q_norm_rope_kv_write_args {
    size_t size;
    int64_t tokens;
    int32_t heads, out_heads; /* out_heads is at least heads: 64 or 128, as kernels of attention take them */
    cpa_dtype dtype;
    const void *q; /* [tokens, heads, 512]; q, kv, q_out and their strides are multiples of 16 bytes */
    int64_t q_stride;
    const void *kv_rows; /* [tokens, 512] */
    int64_t kv_stride;
    float eps;
    cpa_rope rope;
    const int64_t *positions; /* [tokens] */
    void *q_out;              /* [tokens, out_heads, 512]; overlaps nothing that is read */
    int64_t q_out_stride;
    const int64_t *slots; /* [tokens] */
    cpa_kv_view kv;       /* k_dim = 512; not CPA_FP8_E4M3 without k_scale */
} cpa_q_norm_rope_kv_write_args;
CPA_API cpa_status cpa_q_norm_rope_kv_write(const cpa_q_norm_rope_kv_write_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
