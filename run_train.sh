#!/usr/bin/env bash
# Train a config with as many ranks on this node as its degrees ask for.
#
#   ./run_train.sh CONFIG [--section.key=value ...]     CONFIG: a TOML file, or a name in configs/, as in debug
#
#   NGPU=N          ranks on this node, instead of what the config's degrees ask for
#   LOG_RANK=0,1    ranks of this node whose output is shown (default 0)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   multi-node: run it on each node (see slurm.sh)
#   PYTHON          the Python interpreter (default python)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

case " $* " in *" --help "* | *" -h "*) exec "$python" -m titanlite.launcher --help ;; esac

# The config is checked once, before any rank starts: a mistake is one line and not a traceback of every rank.
ranks=$("$python" -m titanlite.launcher "$@")

if [ "${NNODES:-1}" -gt 1 ]; then
    launch=(--nnodes="$NNODES" --node-rank="${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
        --rdzv-backend=c10d --rdzv-id="${JOB_ID:-titanlite}"
        --rdzv-endpoint="${MASTER_ADDR:?set MASTER_ADDR to the hostname of node 0}:${MASTER_PORT:-29500}")
else
    launch=(--standalone)
fi
# torchrun gives each rank one thread; here the ranks share the cores, which matters on a CPU.
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
# Expandable segments lose less memory to fragmentation.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

"$python" -m torch.distributed.run "${launch[@]}" --nproc-per-node="$ranks" \
    --local-ranks-filter="${LOG_RANK:-0}" --role=rank --tee=3 "$here/train.py" "$@" &
torchrun=$!
# SIGTERM is sent to the ranks and not to torchrun, which would kill them: they finish the step, save a checkpoint, and
# exit with 0. pkill -P reaches only the children of this torchrun.
trap 'pkill -TERM -P "$torchrun" || true' TERM
trap 'kill -INT "$torchrun"' INT
status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do # a trapped signal ends wait before torchrun ends
    status=0
    wait "$torchrun" || status=$?
done
exit "$status"
