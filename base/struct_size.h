/* Structs of the public interface that begin with their size. A caller built against an older header knows fewer
 * fields, and means zero by the others; one built against a newer header knows more, and may use none of them. */
#ifndef CPA_BASE_STRUCT_SIZE_H
#define CPA_BASE_STRUCT_SIZE_H

#include <stddef.h>

#include <cpattn/status.h>

/* Copies the struct at `given`, whose first member is its size, to `out`, which is `known` bytes long and gets `known`
 * as its size. CPA_INVALID for NULL, for less than `least` bytes, and for bytes beyond `known` that are not zero. */
cpa_status cpa_struct_take(const char *where, const void *given, size_t least, size_t known, void *out, cpa_error *err);

/* The same for a struct whose optional members all lie behind the member `last`. */
#define CPA_STRUCT_TAKE(where, given, type, last, out, err)                                                            \
    cpa_struct_take(where, given, CPA_STRUCT_THROUGH(type, last), sizeof(type), out, err)

/* The size of a struct that would end with that member. */
#define CPA_STRUCT_THROUGH(type, member)                                                                               \
    ((offsetof(type, member) + sizeof(((type *)0)->member) + _Alignof(type) - 1) / _Alignof(type) * _Alignof(type))

/* Fills the `size` bytes of the caller's struct from one of `known` bytes; what the library does not know is zero.
 * CPA_INVALID, and nothing else, for NULL. */
cpa_status cpa_struct_give(const void *from, size_t known, void *out, size_t size);

int cpa_is_zero(const void *memory, size_t bytes);

/* Whether the bytes that later versions may give a meaning are zero. */
#define CPA_RESERVED_IS_ZERO(s) cpa_is_zero((s).reserved, sizeof(s).reserved)

#endif
