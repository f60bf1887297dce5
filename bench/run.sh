#!/usr/bin/env bash
# Every figure of docs/results.md and the README: runs that were interrupted are continued.
#   bench/run.sh [NAME ...]      all runs, or those named; results in bench/results/NAME.json
# DATA is the folder of the public question files; build/widened is made where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-../shared/data}
PATH="$PWD/.venv/bin:$PATH"
THREADS=${THREADS:-2}
WANTED=("$@")

wanted() {
    [ ${#WANTED[@]} -eq 0 ] && return 0
    local name
    for name in "${WANTED[@]}"; do [ "$name" = "$1" ] && return 0; done
    return 1
}

# run NAME OPTIONS...: a benchmark; its summary goes to bench/results
run() {
    local name=$1
    shift
    wanted "$name" || return 0
    echo "== $name"
    token-recycling bench "$@" --threads "$THREADS" --out "build/bench/$name" --resume
    cp "build/bench/$name/summary.json" "bench/results/$name.json"
}

# run_widened NAME SHAPE OPTIONS...: the bundled model at the cost of SHAPE
run_widened() {
    local name=$1 model=build/widened/$2
    shift 2
    wanted "$name" || return 0
    [ -e "$model" ] || { mkdir -p build/widened; token-recycling widen bundled --to "${model##*/}" "$model"; }
    run "$name" -m "$model" "$@"
}

FIXED=paper@ranked-1,paper@ranked-3,paper@ranked-7,paper@ranked-15,paper@ranked-31

# Real shapes.
REAL="generate,generate-pld,prompt-lookup,paper,auto,$FIXED"
for shape in smollm2-135m qwen2.5-0.5b; do
    run_widened "$shape-bfloat16" "$shape" --dtype bfloat16 --per-kind 2 -n 64 --decoders "$REAL"
    run_widened "$shape-float32" "$shape" --dtype float32 --per-kind 1 -n 40 --decoders "$REAL"
done

# The command with its defaults, and a shorter comparison three times: how far does it spread?
run bundled
for repeat in 1 2 3; do THREADS=1 run "spread-$repeat" --per-kind 4 -n 64; done

# Is auto's choice the best one? Every draft size, fixed.
THREADS=1 run bundled-sizes --per-kind 2 --decoders "generate,none,$FIXED,paper@ranked-23,paper@ranked-80,auto"

# The adaptive drafter: side by side, its draft size, its parts, its kinds of text.
ADAPTIVE=generate,generate-pld,paper,paper@auto,adaptive@ranked-15,auto
ADAPTIVE+=,adaptive@ranked-15+graph,auto+graph,none+graph
run_widened adaptive-smollm2-135m-bfloat16 smollm2-135m --dtype bfloat16 --per-kind 2 \
    --decoders "$ADAPTIVE"
run adaptive-bundled --decoders "$ADAPTIVE,prompt-lookup,adaptive"
run adaptive-public --suite "spec-bench=$DATA/spec_bench/question.jsonl" \
    --suite "gsm8k=$DATA/gsm8k_test.jsonl" --per-kind 6 --decoders generate,paper,adaptive,adaptive@ranked-15
run adaptive-sampled --per-kind 3 --temp 0.8 \
    --decoders generate,paper,adaptive,adaptive@ranked-15,adaptive@ranked-15+graph,auto,auto+graph
run_widened adaptive-low-redundancy smollm2-135m --dtype bfloat16 -n 64 \
    --suite bench/suites/low-redundancy.jsonl --decoders generate,generate-pld,paper,auto
PARTS=adaptive-no-pairs,adaptive-no-averages,adaptive-no-chain,adaptive-no-calibration
run adaptive-parts --per-kind 3 --decoders "generate,paper,adaptive,$PARTS"

# The paper's open questions: k, temperature, cold and hot start.
THREADS=1 run k --per-kind 2 -n 64 --decoders generate,paper,auto --sweep k=2,4,8,16
THREADS=1 run temperature --per-kind 2 -n 64 --decoders generate,prompt-lookup,paper,auto \
    --sweep temperature=0,0.3,0.7,1.0
THREADS=1 run start --per-kind 2 -n 64 --decoders generate,paper,auto --sweep start=cold,hot

# The field's questions.
THREADS=1 run public --suite "spec-bench=$DATA/spec_bench/question.jsonl" \
    --suite "mbpp=$DATA/mbpp/question.jsonl" --suite "gsm8k=$DATA/gsm8k_test.jsonl" --per-kind 5
