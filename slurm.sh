#!/usr/bin/env bash
# Example: 8 nodes of 8 GPUs.  sbatch slurm.sh configs/YOUR.toml [--section.key=value ...]
#SBATCH --job-name=titanlite
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
# SLURM sends SIGTERM 120 s before the time limit: the run finishes its step, saves a checkpoint and exits; submitted
# again, it resumes (with checkpoint.enable = true).
set -euo pipefail
export NNODES=$SLURM_NNODES MASTER_PORT=29500 JOB_ID=$SLURM_JOB_ID
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# One launcher per node; each starts as many ranks there as the config's degrees ask for. It gets all CPUs of its node:
# without --cpus-per-task, which srun does not take from sbatch since SLURM 22.05, the launcher and all its ranks may be
# bound to a single core. NCCL binds its threads to those of a rank's CPUs that are on the socket of its GPU.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \
    bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run_train "$@"
