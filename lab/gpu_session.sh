#!/usr/bin/env bash
# All that is to be measured on a GPU machine, the most wanted first; figures are written as it goes.
#   lab/gpu_session.sh OUT PACKED [SHAPE]    PACKED: a folder that gpu_model.py has written
#   lab/gpu_session.sh OUT --dry-run         on a CPU, with the bundled model
# Each part may take so many seconds, and one that fails does not stop the others. vLLM beside us, on the
# checkpoint in /dev/shm/wide: see docs/graph.md.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 packed=$2 shape=${3:-llama-8b}
export PYTHONPATH=src:kernels/src:lab:tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
begun=$SECONDS
mkdir -p "$out"

part() { # NAME SECONDS COMMAND…
    local name=$1 limit=$2 code=0
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "== $name: exit $code after $((SECONDS - begun)) s"
    tail -n 12 "$out/$name.log"
}

if [ "$packed" = --dry-run ]; then
    part first 300 "$python" lab/gpu_first_answers.py "$out/first.json" --dry-run
    part smoke 300 "$python" lab/gpu_smoke.py "$out/smoke.json" --dry-run --parts=costs,batches
    exit
fi
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
part widen 120 "$python" -c 'import sys; from gpu_model import save_widened; save_widened(*sys.argv[1:])' "$packed" "$shape"
part first 420 "$python" lab/gpu_first_answers.py "$out/first.json" /dev/shm/wide /dev/shm/prompts.json --answers 12
part tests 240 "$python" -m pytest -q -x tests/graph/test_cuda.py tests/model/test_gpu_layers.py tests/model/test_cache_kernel.py
part drafts 120 "$python" -m pytest -q tests/drafting/test_device_kernels.py -k "many_rows or oracle"
part smoke 300 "$python" lab/gpu_smoke.py "$out/smoke.json" --model "$packed" --shape "$shape" --parts=costs,profile,batches,linear
