/* The inline functions of the installed headers as symbols of the library, for callers that cannot include a header. */
#include <cpattn/api.h>

#undef CPA_INLINE
#define CPA_INLINE CPA_API
#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* the definition is the only declaration there is */

#include <cpattn/cpattn.h>
