#!/usr/bin/env bash
# A job of SLURM that is queued again until its script has come to its end:
#
#     sbatch examples/slurm.sh --path runs/a --steps 100000
#
# Two minutes before the time is over, or when the job is preempted, SLURM sends TERM to this script alone (B:), which
# passes it on: the ranks save and end (see resume.py), within the 30 s that torchrun gives them, and the job is queued
# again. A node that fails queues it again by itself; then the newest complete checkpoint is what the last save was.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -u

again() {
    kill -TERM "$job"
    wait "$job"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap again TERM

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a restart meets the addresses of the start before (pytorch#135712)
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-8}" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" \
    "${SCRIPT:-examples/resume.py}" "$@" &
job=$!
wait "$job"
