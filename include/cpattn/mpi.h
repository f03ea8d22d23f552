/* Communicators from MPI: libcpattn_mpi, the only part of the project that needs MPI. */
#ifndef CPATTN_MPI_H
#define CPATTN_MPI_H

/* The C++ bindings that some MPI's headers bring along warn about their own casts. */
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wcast-function-type"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
#include <mpi.h>
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#include <cpattn/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of an MPI communicator, which is duplicated and may be freed afterwards. Collective over it. Needs MPI at
 * MPI_THREAD_FUNNELED or more, and every use of the communicator in MPI's main thread; the threads of the library call
 * no MPI. Destroy it before MPI_Finalize. CPA_INVALID where MPI is not initialised, finalised, or below that level. */
CPA_API cpa_status cpa_comm_from_mpi(MPI_Comm mpi_comm, const cpa_comm_options *options, cpa_comm **out,
                                     cpa_error *err);

#ifdef __cplusplus
}
#endif
#endif
