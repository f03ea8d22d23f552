#include "src/context/transport_choice.h"

#include "base/check.h"
#include "comm/transports.h"

#ifdef CPA_HAVE_CUDA
#include "comm/device_transport.h"

/* What one transport took for each size, or why it is not used. */
static void report(const cpa_transport_choice *choice, int index) {
    const cpa_transport_row *row = &cpa_transport_rows[index];
    if (row->memory != CPA_BACKEND_CUDA) return;
    if (choice->why_not[index][0]) {
        cpa_log(CPA_LOG_INFO, "%s is not used: %s", row->what, choice->why_not[index]);
        return;
    }
    for (int i = 0; i < CPA_CHOICE_SIZES; i++) {
        cpa_log(CPA_LOG_INFO, "exchange of %lld bytes: %s %.1f us%s", (long long)choice->bytes[i], row->what,
                choice->seconds[index][i] * 1e6, choice->table == row->table ? " (chosen)" : "");
    }
}

static cpa_status choose_measured(cpa_control *control, const cpa_device *device, const cpa_transport_table **out,
                                  cpa_error *err) {
    cpa_transport_choice choice;
    CPA_TRY(cpa_transport_choose(control, &device->memory, &choice, err));
    for (int i = 0; control->rank == 0 && control->size > 1 && i < CPA_TRANSPORTS; i++) report(&choice, i);
    *out = choice.table;
    return CPA_OK;
}
#endif

cpa_status cpa_transport_for(cpa_control *control, const cpa_device *device, cpa_transport_kind wanted,
                             const cpa_transport_table **out, cpa_error *err) {
    (void)control;
    if (wanted != CPA_TRANSPORT_AUTO) return cpa_transport_find(wanted, device->backend, out, err);
#ifdef CPA_HAVE_CUDA
    if (device->backend == CPA_BACKEND_CUDA) return choose_measured(control, device, out, err);
#endif
    return cpa_transport_find(CPA_TRANSPORT_HOST, device->backend, out, err);
}
