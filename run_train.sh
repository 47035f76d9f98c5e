#!/usr/bin/env bash
# Train a config with as many ranks on this node as its degrees ask for; the same as `titanlite train`, from a checkout.
#
#   ./run_train.sh CONFIG [--section.key=value ...]     CONFIG: a TOML file, or a name in configs/, as in debug
#
#   NGPU=N          ranks on this node, instead of what the config's degrees ask for
#   LOG_RANK=0,1    ranks of this node whose output is shown (default 0); that of all is in DUMP_FOLDER/logs
#   MAX_RESTARTS=N  how often the ranks are started anew after a failure (default 0)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, JOB_ID   multi-node: run it on each node (see slurm.sh)
#   PYTHON          the Python interpreter (default python)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 # no modules from the working directory
exec "${PYTHON:-python}" -m titanlite train "$@"
