#!/usr/bin/env bash
# A Slurm of one node on this machine, to try a job before it goes to a cluster. As root, with Debian's packages
# slurmctld, slurmd and slurm-client:
#     slurm_on_one_machine.sh start FOLDER    returns when it takes jobs; SLURM_CONF has to name FOLDER/slurm.conf
#     slurm_on_one_machine.sh stop FOLDER
# The node pretends to have four GPUs, which are files, and enough cores for any job, and it believes whoever asks.
set -euo pipefail

start() {
    local folder host first_port
    mkdir -p "$1/state" "$1/spool"
    folder=$(realpath "$1")
    host=$(hostname -s) first_port=$((20000 + RANDOM % 10000))
    cat >"$folder/slurm.conf" <<END
ClusterName=trial
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$first_port
SlurmdPort=$((first_port + 1))
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=64 Sockets=1 CoresPerSocket=64 ThreadsPerCore=1 Gres=gpu:4
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE
END
    printf 'Name=gpu File=/dev/%s\n' null zero full random >"$folder/gres.conf"
    export SLURM_CONF=$folder/slurm.conf
    slurmctld
    slurmd
    for ((i = 0; i < 100; i++)); do
        [ "$(sinfo -h -o %T 2>/dev/null)" != idle ] || return 0
        sleep 0.2
    done
    echo "slurm_on_one_machine.sh: the node takes no jobs; $folder/slurmctld.log and slurmd.log say why" >&2
    return 1
}

stop() {
    kill "$(cat "$1/slurmd.pid")" "$(cat "$1/slurmctld.pid")"
}

case ${1:-} in
    start | stop) "$1" "${2:?names no folder}" ;;
    *) echo "usage: slurm_on_one_machine.sh start|stop FOLDER" >&2 && exit 2 ;;
esac
