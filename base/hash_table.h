/* Hash tables (uthash), as this project uses them: an entry for which there is no memory is left out, and has no table
 * (hh.tbl is NULL), instead of ending the process. */
#ifndef CPA_BASE_HASH_TABLE_H
#define CPA_BASE_HASH_TABLE_H

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#endif
