/* How functions are declared: what the shared library exports, and what is compiled into the caller as well.
 *
 * Structs that begin with their size may grow: a caller says how much of one it knows, which is any size from the last
 * member without a default on, and the rest means zero. Structs that lie in others or in arrays keep their length:
 * later members take the place of `reserved`, which has to be zero. */
#ifndef CPATTN_API_H
#define CPATTN_API_H

/* Marks the symbols that the shared library exports; everything else is hidden. */
#define CPA_API __attribute__((visibility("default")))

/* A function small enough to be compiled into its callers. The library exports it too, for callers in languages that
 * cannot include this header. */
#ifndef CPA_INLINE
#define CPA_INLINE static inline
#endif

#ifdef __CUDACC__
#define CPA_HOST_DEVICE __host__ __device__
#else
#define CPA_HOST_DEVICE
#endif

#endif
