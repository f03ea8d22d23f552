/* The check of which keys a layer attends. */
#ifndef CPA_OPS_CHECK_SELECTION_H
#define CPA_OPS_CHECK_SELECTION_H

#include <cpattn/selection.h>

/* `where` begins the line that says what is wrong. */
cpa_status cpa_check_selection(const char *where, const cpa_key_selection *selection, cpa_error *err);

#endif
