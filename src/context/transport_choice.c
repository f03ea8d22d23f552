#include "src/context/transport_choice.h"

#include "base/check.h"

#ifdef CPA_HAVE_CUDA
#include "comm/device_transport.h"

static cpa_status choose_measured(cpa_control *control, const cpa_transport_table **out, cpa_error *err) {
    cpa_transport_choice choice;
    CPA_TRY(cpa_transport_choose(control, &choice, err));
    for (int i = 0; control->rank == 0 && control->size > 1 && i < CPA_CHOICE_SIZES; i++) {
        cpa_log(CPA_LOG_INFO, "exchange of %lld bytes: NCCL %.1f us, peer memory %.1f us; chosen: %s",
                (long long)choice.bytes[i], choice.nccl_s[i] * 1e6, choice.peer_s[i] * 1e6, choice.table->name);
    }
    if (control->rank == 0 && choice.why_no_nccl[0]) cpa_log(CPA_LOG_INFO, "NCCL is not used: %s", choice.why_no_nccl);
    if (control->rank == 0 && choice.why_no_peer[0])
        cpa_log(CPA_LOG_INFO, "peer memory is not used: %s", choice.why_no_peer);
    *out = choice.table;
    return CPA_OK;
}
#endif

cpa_status cpa_transport_for(cpa_control *control, const cpa_device *device, cpa_transport_kind wanted,
                             const cpa_transport_table **out, cpa_error *err) {
#ifdef CPA_HAVE_CUDA
    if (device->backend == CPA_BACKEND_CUDA) {
        if (wanted == CPA_TRANSPORT_AUTO) return choose_measured(control, out, err);
        *out = wanted == CPA_TRANSPORT_NCCL ? &cpa_transport_nccl : &cpa_transport_peer;
        return CPA_OK;
    }
#endif
    (void)control, (void)device;
    if (wanted != CPA_TRANSPORT_AUTO)
        return cpa_fail(err, CPA_INVALID, "transport: found %s, expected auto: ranks on the host have one way to send",
                        wanted == CPA_TRANSPORT_NCCL ? "nccl" : "peer");
    *out = &cpa_transport_host;
    return CPA_OK;
}
