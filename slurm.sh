#!/usr/bin/env bash
# Example: 8 nodes of 8 GPUs.  sbatch slurm.sh configs/YOUR.toml --checkpoint.enable [--section.key=value ...]
#SBATCH --job-name=titanlite
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# SLURM sends SIGUSR1 to this script 120 s before the time limit, and on preemption where the cluster has
# PreemptParameters=send_user_signal and a GraceTime. The run then finishes its step, saves a checkpoint and exits, and
# the job is requeued: it resumes from that checkpoint. Set 120 to more than a step and a save take. A job that is killed
# without a signal (a failed node, preemption without GraceTime) is requeued by SLURM itself, because of --requeue.
set -euo pipefail
export NNODES=$SLURM_NNODES MASTER_PORT=29500 JOB_ID=$SLURM_JOB_ID
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*} # the first line; `head` would end this script if scontrol were still writing

requeue=no
stop_and_requeue() {
    trap '' USR1
    requeue=yes
    scancel --signal=TERM "$SLURM_JOB_ID" # to the launchers only, not to this script; srun itself would kill them
}
trap stop_and_requeue USR1

# One launcher per node; each starts as many ranks there as the config's degrees ask for. It gets all CPUs of its node:
# without --cpus-per-task, which srun does not take from sbatch since SLURM 22.05, the launcher and all its ranks may be
# bound to a single core. NCCL binds its threads to those of a rank's CPUs that are on the socket of its GPU.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \
    bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run_train "$@" &
status=0
wait $! || status=$?
if [[ $requeue = yes ]]; then # the trap has ended this wait, so wait again; 127: it had not, and the status is known
    ended=0
    wait $! || ended=$?
    [[ $ended = 127 ]] || status=$ended
fi
if [[ $requeue = yes && $status = 0 ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
