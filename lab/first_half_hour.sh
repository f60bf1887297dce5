#!/usr/bin/env bash
# The first half hour on a machine with a GPU: three parts of at most ten minutes each.
#   lab/first_half_hour.sh PART OUT      PART: 1 correctness, 2 costs, 3 speeds; OUT: a folder
# The installed PyTorch and Triton are used; nothing is downloaded. Every result is written to OUT
# at once, and a step that fails or takes too long does not end the others.
set -u
cd "$(dirname "$0")/.."
PART=${1:?1, 2 or 3}
OUT=${2:?a folder for the results}
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/lab${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TOKEN_RECYCLING_CACHE=${TOKEN_RECYCLING_CACHE:-$OUT/cache}
PYTHON=${PYTHON:-python}
DRY=${DRY:-}  # set: the same steps on a CPU with a tiny model
mkdir -p "$OUT"

# step NAME SECONDS COMMAND...: what it prints and its exit code go to OUT/NAME.txt
step() {
    local name=$1 seconds=$2
    shift 2
    echo "== $name (at most $seconds s)"
    timeout --kill-after=10 "$seconds" "$@" > "$OUT/$name.txt" 2>&1
    echo "exit code $?" >> "$OUT/$name.txt"
    tail -n 4 "$OUT/$name.txt"
}

suite() {
    local name=$1 seconds=$2
    shift 2
    if [ -n "$DRY" ]; then
        step "$name" "$seconds" "$PYTHON" lab/gpu_suite.py --dry-run --out "$OUT/$name.json" "$@"
    else
        step "$name" "$seconds" "$PYTHON" lab/gpu_suite.py --out "$OUT/$name.json" "$@"
    fi
}

case $PART in
1)
    step versions 60 "$PYTHON" -c "
import torch, transformers, triton
print(torch.__version__, transformers.__version__, triton.__version__, torch.version.cuda)
print(torch.cuda.is_available() and torch.cuda.get_device_name(), torch.backends.cudnn.version())"
    step device-kernels 150 "$PYTHON" -m pytest -x -q tests/drafting/test_device_kernels.py
    step cuda 210 "$PYTHON" -m pytest -q tests/graph/test_cuda.py
    suite identity 120 --parts identity,syncs,launches
    ;;
2)
    suite costs 240 --parts costs
    suite drafting 90 --parts drafting
    suite kernels 120 --parts kernels
    suite phases 60 --parts phases
    suite compiled 120 --parts compiled
    ;;
3)
    suite speeds 300 --parts speeds
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1 suite speeds-without-cudnn 240 --parts speeds
    ;;
*)
    echo "PART is 1, 2 or 3" >&2
    exit 2
    ;;
esac
