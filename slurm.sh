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
# One launcher per node; each starts as many ranks there as the config's degrees ask for.
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run_train "$@"
