/* The loops over elements and keys of the check are also compiled for the wider vectors of newer x86 CPUs. */
#ifndef CPA_VECTOR_LOOPS_H
#define CPA_VECTOR_LOOPS_H

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CPA_VECTOR_LOOPS __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CPA_VECTOR_LOOPS
#endif

#endif
