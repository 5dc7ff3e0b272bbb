#!/bin/bash
# Train a recipe on whole nodes of a Slurm cluster; docs/many-gpus.md explains it.
#
#     sbatch --nodes 4 examples/slurm/train.sh RECIPE [--set a.b=c]...
#
# At the time limit all processes save a checkpoint. The job goes back into the queue until the run is done.
#SBATCH --job-name=headway
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=headway-%j.log

set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: sbatch --nodes N $0 RECIPE [options of headway train]" >&2
    exit 2
fi
if [[ -n "${HEADWAY_ENV:-}" ]]; then
    # shellcheck disable=SC1090 - the user's own file
    source "$HEADWAY_ENV"
fi

export MASTER_HOST MASTER_PORT STOPPED
MASTER_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((29500 + SLURM_JOB_ID % 1000)) # jobs that share a node do not meet each other
STOPPED=$PWD/headway-$SLURM_JOB_ID.stopped
rm -f "$STOPPED"

# On each node: torchrun in a group of its own, so that Slurm's SIGTERM reaches this shell alone, which hands it to the
# training processes. torchrun itself would give them 30 s and count their end as a failure.
node='
setsid torchrun \
    --nnodes "${SLURM_JOB_NUM_NODES:-1}" --nproc-per-node "${GPUS_PER_NODE:-8}" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_HOST:$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID" \
    --no-python headway train "$@" --resume-if-any &
torchrun=$!
trap "touch \"\$STOPPED\"; pkill -TERM -P $torchrun" TERM
while kill -0 $torchrun 2>/dev/null; do wait $torchrun; status=$?; done
exit $status
'
srun --kill-on-bad-exit=1 bash -c "$node" headway "$@"

if [[ -e "$STOPPED" ]]; then
    rm -f "$STOPPED"
    scontrol requeue "$SLURM_JOB_ID"
fi
