#!/usr/bin/env bash
# What can be tried on one GPU, with the torch that is there and no network: parity of training steps on the device
# (one rank over NCCL; two and four ranks that share it, over gloo), programs that are written for GPUs against eager,
# then times and memory against torch's own.
#
#     bash benchmarks/gpu.sh [folder for the results]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# The last one: a look at whether there is a GPU must not keep forked processes from using it.
export PYTORCH_NVML_BASED_CUDA_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out="${1:-.}"
mkdir -p "$out"

python3 - <<'CHECK' || exit 1
import torch

if not torch.cuda.is_available():
    raise SystemExit(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU here. The same code runs on the CPU:\n"
        "    python -m benchmarks.gpu_parity; python benchmarks/gpu.py --device cpu --size tiny --rounds 2"
    )
print("torch", torch.__version__, "on", torch.cuda.get_device_name(0))
CHECK
AUTOPARALLEL_TEST_DEVICE=cuda timeout 240 python3 -m benchmarks.gpu_parity 2>&1 | tee "$out/parity.log"
parity=$?
AUTOPARALLEL_TEST_DEVICE=cuda timeout 120 python3 -W ignore -m tests.capture --jobs 8 on_gpus 2>&1 | tee "$out/programs.log"
! grep -q '^!' "$out/programs.log"
programs=$?
timeout 280 python3 benchmarks/gpu.py --out "$out" 2>&1 | tee "$out/figures.log"
figures=$?
[ "$parity" -eq 0 ] && [ "$programs" -eq 0 ] && [ "$figures" -eq 0 ]
