/* How functions are declared: what the shared library exports, and what is compiled into the caller as well. */
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
