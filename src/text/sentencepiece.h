/* The library sentencepiece, which is in C++, for C: a model, its pieces, and texts into ids of them. */
#ifndef CPA_TEXT_SENTENCEPIECE_H
#define CPA_TEXT_SENTENCEPIECE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Does not change once it is open: any number of threads may use one at once. */
typedef struct cpa_sentencepiece cpa_sentencepiece;

typedef enum cpa_piece_kind {
    CPA_PIECE_NORMAL = 0, /* text */
    CPA_PIECE_CONTROL,    /* such as "<s>": no text becomes it */
    CPA_PIECE_UNKNOWN,    /* what characters without a piece become */
    CPA_PIECE_BYTE        /* "<0x00>" and so on */
} cpa_piece_kind;

/* Opens a file; NULL, with the reason in why[bytes], if it is no model. */
cpa_sentencepiece *cpa_sentencepiece_open(const char *path, char *why, size_t bytes);
void cpa_sentencepiece_close(cpa_sentencepiece *model); /* which may be NULL */

/* How many pieces there are; their ids are below. */
int64_t cpa_sentencepiece_count(const cpa_sentencepiece *model);
/* The string of a piece, which lives as long as the model. */
const char *cpa_sentencepiece_piece(const cpa_sentencepiece *model, int64_t id, cpa_piece_kind *kind);
/* The ids of the beginning and the end of a text; -1: none. */
int cpa_sentencepiece_bos(const cpa_sentencepiece *model);
int cpa_sentencepiece_eos(const cpa_sentencepiece *model);
/* How many spaces a text loses that its first pieces begin with: 0, 1, or INT_MAX for all. */
int cpa_sentencepiece_strips(const cpa_sentencepiece *model);

/* Calls fn(ctx, id) for each id of a valid text; a call that returns 0 is the last. 0 if that was so, or there is no
 * memory, else 1. */
int cpa_sentencepiece_encode(const cpa_sentencepiece *model, const char *text, size_t bytes,
                             int (*fn)(void *ctx, uint32_t id), void *ctx);

#ifdef __cplusplus
}
#endif
#endif
