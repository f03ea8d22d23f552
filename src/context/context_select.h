/* The keys that an indexer chooses, for a network. */
#ifndef CPA_CONTEXT_SELECT_H
#define CPA_CONTEXT_SELECT_H

#include <cpattn/model.h>

/* cpa_context_select of the steps of a context; valid as long as it is. */
cpa_key_chooser cpa_context_key_chooser(cpa_context *c);

#endif
