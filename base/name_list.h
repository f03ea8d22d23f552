/* Lists of names in one text, ", " between them. */
#ifndef CPA_BASE_NAME_LIST_H
#define CPA_BASE_NAME_LIST_H

#include <stddef.h>

/* Adds those of `names`, itself such a list, that a list of at most `bytes` bytes does not have yet. A name that finds no
 * room is left out. */
void cpa_name_list_add(char *list, size_t bytes, const char *names);

#endif
