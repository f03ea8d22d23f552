#include "bench/links.h"

#include "base/check.h"
#include "comm/links.h"
#include "src/context/transport_choice.h"

cpa_status cpa_bench_find_links(cpa_bench_site *site, cpa_error *err) {
    static cpa_link links[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS]; /* too large for a small stack */
    CPA_TRY(cpa_transport_for(&site->control, site->device, CPA_TRANSPORT_AUTO, &site->transport, err));
    CPA_TRY(cpa_links_find(&site->control, site->backend, links, err));
    site->links = links;
    return CPA_OK;
}
