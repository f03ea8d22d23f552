/* Which ranks share a host: those whose kernels were booted as one, under one name. */
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/host.h"
#include "comm/comm.h"

enum { HOST_BYTES = 128 };

/* The name of this host and of this boot of its kernel; zeros behind them. */
static void identify(char out[HOST_BYTES]) {
    memset(out, 0, HOST_BYTES);
    cpa_host_boot(out);
    size_t length = strlen(out);
    (void)gethostname(out + length, HOST_BYTES - 1 - length);
}

cpa_status cpa_control_find_host(cpa_control *control, cpa_error *err) {
    char mine[HOST_BYTES], all[CPA_COMM_MAX_RANKS][HOST_BYTES];
    identify(mine);
    CPA_TRY(cpa_control_all_gather(control, mine, sizeof mine, all, err));
    control->here = 0;
    control->ranks_here = control->rank_here = 0;
    for (int32_t rank = 0; rank < control->size; rank++) {
        if (memcmp(all[rank], mine, sizeof mine) != 0) continue;
        control->here |= (uint64_t)1 << rank;
        control->ranks_here++;
        if (rank < control->rank) control->rank_here++;
    }
    return CPA_OK;
}
