/* The call of a tool as an object, {"name": ..., "arguments": {...}}, byte by byte. */
#ifndef CPA_REPLY_CALL_OBJECT_H
#define CPA_REPLY_CALL_OBJECT_H

#include "src/reply/json_scan.h"
#include "src/text/bytes.h"

typedef enum cpa_call_member { CPA_CALL_OTHER = 0, CPA_CALL_NAME, CPA_CALL_ARGUMENTS } cpa_call_member;

/* One of zeros is at the beginning. */
typedef struct cpa_call_object {
    cpa_json_scan scan;
    enum { CPA_CALL_BETWEEN = 0, CPA_CALL_IN_KEY, CPA_CALL_IN_VALUE } where; /* where among the call's own members */
    cpa_call_member member; /* the member whose value comes, or came last */
    char first;             /* first byte of that member's value */
    cpa_bytes string;       /* a key, or a value that is a string, as it came */
    char *name;             /* NULL: not known yet */
    /* The arguments as they came, or the text of a string in their place; "{}" for null, or where there are none, once
     * it is whole. The caller may take from it what there is. */
    cpa_bytes arguments;
    int has_arguments; /* the value of the arguments has begun */
    int is_out_of_memory;
} cpa_call_object;

/* Takes a byte. CPA_JSON_BROKEN for what is no call too: no name, or arguments that are a number. "parameters" are
 * arguments. */
cpa_json_step cpa_call_object_byte(cpa_call_object *object, char byte);

void cpa_call_object_release(cpa_call_object *object);

#endif
