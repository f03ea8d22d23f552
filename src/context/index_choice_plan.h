/* Planning the choice of an indexer. */
#ifndef CPA_INDEX_CHOICE_PLAN_H
#define CPA_INDEX_CHOICE_PLAN_H

#include "src/context/index_choice.h"

/* An indexer's form, its defaults filled in; refused unless it goes with the other options. */
cpa_status cpa_index_form_take(const cpa_context_options *options, int32_t ranks, cpa_index_form *form, cpa_error *err);

/* Plans the choice of the planned step, whose block tables are placed; does nothing without an indexer. */
cpa_status cpa_index_choice_plan(cpa_index_choice *choice);

#endif
