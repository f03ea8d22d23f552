#!/bin/bash
# Two hosts, as far as one kernel can be two: network namespaces with a link between them and names of their own, on
# which mpirun starts ranks by an agent. two_hosts.sh CASE with CP_ATTN and MPIRUN; 77: it needs root and iproute2.
# shellcheck disable=SC2016,SC2086,SC2317 # MPIRUN has options; cases are named by the caller
set -u
if ! ip netns add "cpattn$$a" 2>/dev/null; then
    echo "skipped: no network namespaces, which need root and iproute2"
    exit 77
fi
hosts=("cpattn$$a" "cpattn$$b")
net=10.97.$(($$ % 250))
folder=$(mktemp -d)
failed=0

fail() {
    echo "FAILED: $*"
    failed=1
}

processes() { ip netns pids "${hosts[$1]}"; }

clean_up() {
    local host
    for host in 0 1; do
        processes "$host" | xargs -r kill -9 2>/dev/null
        ip netns delete "${hosts[host]}" 2>/dev/null
    done
    rm -rf "$folder"
}
trap clean_up EXIT

set_up() {
    local host
    ip netns add "${hosts[1]}"
    ip -n "${hosts[0]}" link add link0 type veth peer name link1 netns "${hosts[1]}"
    for host in 0 1; do
        ip -n "${hosts[host]}" addr add "$net.$((host + 1))/24" dev "link$host"
        ip -n "${hosts[host]}" link set lo up
        ip -n "${hosts[host]}" link set "link$host" up
    done
    # agent HOST COMMAND...: what ssh would be.
    cat >"$folder/agent" <<END
#!/bin/bash
case \$1 in *.1) host=${hosts[0]} ;; *) host=${hosts[1]} ;; esac
shift
exec ip netns exec \$host unshare -u bash -c "hostname \$host; \$*"
END
    chmod +x "$folder/agent"
}

# on HOST COMMAND...
on() {
    local host=${hosts[$1]}
    shift
    ip netns exec "$host" unshare -u bash -c 'hostname "$1"; shift; exec "$@"' - "$host" "$@"
}

# Starts four ranks, two a host, from the first one.
start() {
    on 0 $MPIRUN --mca plm_rsh_agent "$folder/agent" --mca btl_tcp_if_include "$net.0/24" \
        --mca oob_tcp_if_include "$net.0/24" --host "$net.1:2,$net.2:2" -np 4 "$CP_ATTN" "$@"
}

# The same without MPI, which meet by a store on the first host; results in store.json, the output of rank R in outR.
start_over_store() {
    local rank ranks=()
    for rank in 0 1 2 3; do
        on $((rank / 2)) env RANK=$rank WORLD_SIZE=4 MASTER_ADDR="$net.1" MASTER_PORT=29555 \
            CPATTN_JOB_SECRET=a-secret-of-this-test-alone "$CP_ATTN" "$@" --result-json "$folder/store.json" \
            >"$folder/out$rank" 2>&1 &
        ranks+=($!)
    done
    for rank in 0 1 2 3; do wait "${ranks[rank]}" || fail "rank $rank over a store: $(cat "$folder/out$rank")"; done
}

digest() { sed -n 's/.*"output_digest": *"\?\([0-9a-f]*\).*/\1/p' "$1"; }

# pairs FILE KIND: how many pairs of ranks links of that kind join, by a result file.
pairs() { grep -c "\"kind\": \"$2\"" "$1"; }

# The report and the result file tell links within a host from those between hosts, with rates, over MPI and over a store.
links() {
    local run="--requests 3 --input-len 200 --output-len 4"
    start $run --result-json "$folder/two.json" >"$folder/out" 2>&1 || fail "two hosts: $(cat "$folder/out")"
    grep -qE '^links       mpi; 2 pairs of ranks joined by shared memory at .* GB/s each way, 4 by sockets' \
        "$folder/out" || fail "no line tells the links: $(cat "$folder/out")"
    [ "$(pairs "$folder/two.json" "shared memory") $(pairs "$folder/two.json" sockets)" = "2 4" ] ||
        fail "other links in the result: $(cat "$folder/two.json")"
    start_over_store $run
    grep -q '^links       tcp; 2 pairs of ranks joined by loopback .*, 4 by sockets' "$folder/out0" ||
        fail "no line tells the links: $(cat "$folder/out0")"
}

# The digest of a run on one host, over MPI and over a store.
same_digest() {
    local run="--requests 3 --input-len 200 --output-len 4"
    $MPIRUN -np 4 "$CP_ATTN" $run --result-json "$folder/one.json" >"$folder/out" 2>&1 || fail "one host: $(cat "$folder/out")"
    start $run --result-json "$folder/two.json" >"$folder/out" 2>&1 || fail "two hosts: $(cat "$folder/out")"
    [ -n "$(digest "$folder/one.json")" ] || fail "no digest"
    [ "$(digest "$folder/one.json")" = "$(digest "$folder/two.json")" ] || fail "two hosts have other results"
    start_over_store $run
    [ "$(digest "$folder/one.json")" = "$(digest "$folder/store.json")" ] || fail "a store has other results"
}

# A link that is cut in the middle of a run: a line names a rank beyond it, the results are written, and within 15 s of
# that line no process is left, of ranks, daemons or mpirun.
cut_link() {
    local most=15 seconds=0 limit
    start --requests 40 --input-len 4000 --output-len 300 --rank-timeout 3 --result-json "$folder/cut.json" \
        >"$folder/out" 2>"$folder/err" &
    for ((limit = 60; limit > 0; limit--)); do
        grep -q requests "$folder/out" && break
        sleep 1
    done
    sleep 2
    ip -n "${hosts[0]}" link set link0 down
    for ((limit = 60; limit > 0; limit--)); do
        grep -q 'rank [23] has not been heard of' "$folder/err" && break
        sleep 0.5
    done
    [ "$limit" -gt 0 ] || fail "no rank is named: $(cat "$folder/err")"
    while [ -n "$(processes 0)$(processes 1)" ] && [ "$seconds" -le "$most" ]; do
        sleep 1
        seconds=$((seconds + 1))
    done
    [ "$seconds" -le "$most" ] || {
        fail "processes are left $most s after the line:"
        ps -o pid,stat,args -p "$(echo "$(processes 0)" "$(processes 1)" | tr -s ' \n' ,)"
    }
    grep -q '"failed": 40' "$folder/cut.json" || fail "no results are written"
    wait
}

set_up
"$1"
exit "$failed"
