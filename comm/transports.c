#include "comm/transports.h"

#include "base/check.h"

#ifdef CPA_HAVE_CUDA
#include "comm/device_transport.h"
#define OF_CUDA(table) &(table)
#else
#define OF_CUDA(table) NULL
#endif

/* kind, name, what, memory, table */
#define ROWS(ROW)                                                                                                      \
    ROW(CPA_TRANSPORT_NCCL, "nccl", "NCCL", CPA_BACKEND_CUDA, OF_CUDA(cpa_transport_nccl))                             \
    ROW(CPA_TRANSPORT_PEER, "peer", "peer memory", CPA_BACKEND_CUDA, OF_CUDA(cpa_transport_peer))                      \
    ROW(CPA_TRANSPORT_HOST, "host", "the communicator", CPA_BACKEND_HOST, &cpa_transport_host)

#define AS_ROW(kind, name, what, memory, table) {kind, name, what, memory, table},
#define AS_NAME(kind, name, what, memory, table) [kind] = name,
const cpa_transport_row cpa_transport_rows[CPA_TRANSPORTS] = {ROWS(AS_ROW)};
const char *const cpa_transport_names[CPA_TRANSPORTS + 2] = {[CPA_TRANSPORT_AUTO] = "auto", ROWS(AS_NAME)};

cpa_status cpa_transport_find(cpa_transport_kind kind, cpa_backend memory, const cpa_transport_table **out,
                              cpa_error *err) {
    const char *whose = memory == CPA_BACKEND_CUDA ? "CUDA devices" : "the host";
    for (int i = 0; i < CPA_TRANSPORTS; i++) {
        const cpa_transport_row *row = &cpa_transport_rows[i];
        if (row->kind != kind) continue;
        if (row->memory != memory)
            return cpa_fail(err, CPA_INVALID, "transport: found %s, which does not carry memory of %s, expected auto",
                            row->name, whose);
        if (!row->table) return cpa_fail(err, CPA_UNSUPPORTED, "transport: %s is not in this build", row->name);
        *out = row->table;
        return CPA_OK;
    }
    return cpa_fail(err, CPA_INVALID, "transport: %d is none, expected 1..%d", (int)kind, CPA_TRANSPORTS);
}
