#include "src/ops/check_selection.h"

#include "base/check.h"
#include "base/struct_size.h"
#include "src/ops/check_args.h"

static cpa_status check_bits(const char *where, const cpa_key_bits *of, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*of), "%s: the reserved bytes of the bits of the selection are not zero", where);
    REQUIRE(err, of->bits && of->row_word && of->first && of->width,
            "%s: the bits of the selection have bits %p, row_word %p, first %p and width %p, expected none to be NULL",
            where, (const void *)of->bits, (const void *)of->row_word, (const void *)of->first,
            (const void *)of->width);
    CPA_TRY(cpa_check_aligned(where, "bits of the selection", of->bits, sizeof *of->bits, err));
    CPA_TRY(cpa_check_aligned(where, "row_word of the selection's bits", of->row_word, sizeof *of->row_word, err));
    CPA_TRY(cpa_check_aligned(where, "first of the selection's bits", of->first, sizeof *of->first, err));
    CPA_TRY(cpa_check_aligned(where, "width of the selection's bits", of->width, sizeof *of->width, err));
    return cpa_check_aligned(where, "row_map of the selection's bits", of->row_map, sizeof *of->row_map, err);
}

/* Rows and heads that lie so far apart can be counted. */
static cpa_status check_stride(const char *where, const char *name, int64_t stride, cpa_error *err) {
    REQUIRE(err, stride >= 0 && stride <= CPA_MOST_BYTES / 4, "%s: %s of the selection is %lld, expected 0 to 2^58",
            where, name, (long long)stride);
    return CPA_OK;
}

static cpa_status check_indices(const char *where, const cpa_key_indices *of, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*of), "%s: the reserved bytes of the selection's indices are not zero", where);
    REQUIRE(err, of->width >= 0 && (of->width == 0 || of->indices),
            "%s: the selection has lists of %d indices at %p, expected 0 or more, and not NULL", where, of->width,
            (const void *)of->indices);
    REQUIRE(err, of->unit >= 0, "%s: unit of the selection's indices is %d, expected 0 or more tokens", where,
            of->unit);
    CPA_TRY(check_stride(where, "row_stride", of->row_stride, err));
    CPA_TRY(check_stride(where, "head_stride", of->head_stride, err));
    CPA_TRY(cpa_check_aligned(where, "indices of the selection", of->indices, sizeof *of->indices, err));
    CPA_TRY(cpa_check_aligned(where, "counts of the selection", of->counts, sizeof *of->counts, err));
    return cpa_check_aligned(where, "row_map of the selection's indices", of->row_map, sizeof *of->row_map, err);
}

static cpa_status check_blocks(const char *where, const cpa_key_blocks *of, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*of), "%s: the reserved bytes of the selection's blocks are not zero", where);
    REQUIRE(err, of->bits && of->row_word,
            "%s: the blocks of the selection have bits %p and row_word %p, expected "
            "neither to be NULL",
            where, (const void *)of->bits, (const void *)of->row_word);
    REQUIRE(err, of->block > 0 && of->width >= 0,
            "%s: the selection has %d blocks of %d tokens, expected 0 or more of 1 or more", where, of->width,
            of->block);
    CPA_TRY(check_stride(where, "head_stride", of->head_stride, err));
    REQUIRE(err, of->head_stride == 0 || of->head_stride >= cpa_mask_words(of->width),
            "%s: head_stride of the selection's blocks is %lld, expected 0 or at least the %lld words of %d blocks",
            where, (long long)of->head_stride, (long long)cpa_mask_words(of->width), of->width);
    CPA_TRY(cpa_check_aligned(where, "bits of the selection's blocks", of->bits, sizeof *of->bits, err));
    CPA_TRY(cpa_check_aligned(where, "row_word of the selection's blocks", of->row_word, sizeof *of->row_word, err));
    return cpa_check_aligned(where, "row_map of the selection's blocks", of->row_map, sizeof *of->row_map, err);
}

cpa_status cpa_check_selection(const char *where, const cpa_key_selection *selection, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*selection), "%s: the reserved bytes of the selection are not zero", where);
    REQUIRE(err, !selection->bits || !selection->blocks,
            "%s: the selection has bits and blocks, expected one of them: a custom mask or a mask of blocks", where);
    if (selection->bits) CPA_TRY(check_bits(where, selection->bits, err));
    if (selection->indices) CPA_TRY(check_indices(where, selection->indices, err));
    return selection->blocks ? check_blocks(where, selection->blocks, err) : CPA_OK;
}
