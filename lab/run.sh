#!/usr/bin/env bash
# Every figure of docs/results.md and the README; a run that is finished is not repeated.
#   lab/run.sh [NAME ...]      all runs, or those named; results in lab/results/NAME.json
# DATA is the folder of the public question files.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-../shared/data}
PATH="$PWD/.venv/bin:$PATH"
THREADS=${THREADS:-2}
WANTED=("$@")
QUESTIONS=build/bench/questions.jsonl
MODEL=build/bench/SmolLM2-135M-Instruct
mkdir -p build/bench
ln -sfn "$(token-recycling fetch-model)" "$MODEL"  # the same name in every record

wanted() {
    [ ${#WANTED[@]} -eq 0 ] && return 0
    local name
    for name in "${WANTED[@]}"; do [ "$name" = "$1" ] && return 0; done
    return 1
}

# real NAME OPTIONS...: a benchmark of the real model on Spec-Bench, GSM8K and MBPP; its summary
# goes to lab/results
real() {
    local name=$1
    shift
    wanted "$name" || return 0
    echo "== $name"
    [ -e "build/bench/$name/tables.md" ] && [ ! -e "build/bench/$name/state.safetensors" ] ||
        token-recycling bench -m "$MODEL" --suite "$QUESTIONS" "$@" --threads "$THREADS" \
            --out "build/bench/$name"
    python -m json.tool --compact "build/bench/$name/summary.json" "lab/results/$name.json"
}

# What a new user has: costs are measured at load; nothing is there before.
export TOKEN_RECYCLING_CACHE=$PWD/build/bench/cache
python lab/questions.py --data "$DATA" --out "$QUESTIONS"

real real --per-kind 3 --decoders generate,generate-pld,none,prompt-lookup,paper,auto,adaptive:nodes=8
real real-cold --per-kind 1 --decoders generate,none,auto:cold=yes
real real-sampled --per-kind 1 --temp 0.8 --decoders generate,none,auto
if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then               # torch converts elsewhere
    real real-bfloat16 --dtype bfloat16 --per-kind 1 --decoders generate,none,auto
fi

# docs/research.md
real ablation --per-kind 1 -n 32 --decoders \
    'none,paper:nodes=80:k=1|2|4|8|12:cold=no|yes,paper:k=8:nodes=10|20|40|80:cold=no|yes'

if wanted demo; then
    echo "== demo"
    token-recycling demo -m "$MODEL" > lab/results/demo.txt
fi
