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

cpa_status cpa_check_selection(const char *where, const cpa_key_selection *selection, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*selection), "%s: the reserved bytes of the selection are not zero", where);
    return selection->bits ? check_bits(where, selection->bits, err) : CPA_OK;
}
