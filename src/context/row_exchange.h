/* Rows that a network has other ranks compute. */
#ifndef CPA_ROW_EXCHANGE_H
#define CPA_ROW_EXCHANGE_H

#include <cpattn/model.h>

/* The exchange of rows over the ranks of a context, in the order of its layers; valid as long as it is. */
cpa_row_exchange cpa_context_row_exchange(cpa_context *c);

#endif
