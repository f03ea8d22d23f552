#include "program/names.h"

#include <cpattn/names.h>

#include "base/check.h"

cpa_status cpa_named_dtype(const char *text, const char **name, cpa_error *err) {
    cpa_dtype dtype;
    CPA_TRY(cpa_dtype_of_name(text, &dtype, err));
    *name = cpa_dtype_name(dtype);
    return CPA_OK;
}

cpa_status cpa_named_layout(const char *text, const char **name, cpa_error *err) {
    cpa_kv_layout layout;
    CPA_TRY(cpa_kv_layout_of_name(text, &layout, err));
    *name = cpa_kv_layout_name(layout);
    return CPA_OK;
}
