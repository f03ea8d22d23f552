/* The work of a layer of attention over latents by its two ways, counted.
 *
 * Of H heads over latents [c | r] of B bytes, with queries and keys of n + r columns, values of v, e bytes an element; R
 * rows of a rank meet K keys, P pairs of a row and a key that it sees (DeepSeek-AI, arXiv:2405.04434):
 *     expand   2H(n + v)cK                      keys and values of all heads, written: (B + H(n + r + v)e)K bytes
 *              2H(n + r + v)P                   attention, which reads them: H(n + r + v)eK bytes
 *     absorb   2H(n + v)cR                      queries folded, results multiplied
 *              2H(2c + r)P                      attention, which reads the latents: BK bytes
 * Each line takes as long as its products or its bytes, whichever are more: a byte counts as CPA_FLOPS_A_BYTE. */
#ifndef CPA_LATENT_WORK_H
#define CPA_LATENT_WORK_H

#include <cpattn/shape.h>

/* What a device with tensor cores multiplies in 16 bits while it moves a byte of its memory: of an H100 790 TFLOP/s and
 * 3.1 TB/s. */
enum { CPA_FLOPS_A_BYTE = 255 };

/* On the rank with the most. */
typedef struct cpa_latent_load {
    double rows, keys, pairs;
} cpa_latent_load;

/* The rows of `tokens` new tokens over those and `cached` before them, of which a rank has one of `row_ranks` parts of the
 * rows, and one of `key_ranks` parts of the keys. */
cpa_latent_load cpa_latent_load_of(int64_t tokens, int64_t cached, int32_t row_ranks, int32_t key_ranks);

/* Whether it is less to absorb. `cache`: shape of the latents; `expanded`: that of the heads that they are expanded to.
 * Pure. */
int cpa_latents_are_absorbed(const cpa_attention_shape *cache, const cpa_attention_shape *expanded,
                             cpa_latent_load load);

#endif
