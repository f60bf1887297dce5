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

# What a new user has: costs are measured at load, in about a second, and not by `tune`. Rows that
# the model fills itself are computed by the first run.
export TOKEN_RECYCLING_CACHE=$PWD/build/bench/cache
NEW=--no-tune

# Every decoder on the bundled questions; and a shorter comparison three times: how far does it spread?
ALL=generate,generate-pld,none,prompt-lookup,paper,paper@auto,adaptive,adaptive@ranked-15,auto
run bundled $NEW --decoders "$ALL,none+graph,auto+graph"
for repeat in 1 2 3; do
    run "spread-$repeat" $NEW --per-kind 4 -n 64 --decoders generate,generate-pld,auto
done

# Is auto's size the best one? Every size, fixed, at the cost of several shapes.
SIZES=adaptive@ranked-3,adaptive@ranked-7,adaptive@ranked-11,adaptive@ranked-15,adaptive@ranked-23
SIZES+=,adaptive@ranked-31,adaptive@ranked-47
SIZES=generate,generate-pld,none,paper,auto,$SIZES
run sizes-bundled $NEW --per-kind 3 -n 96 --decoders "$SIZES"
run_widened sizes-smollm2-135m-bfloat16 smollm2-135m $NEW --dtype bfloat16 --per-kind 2 -n 64 \
    --decoders "$SIZES"
run_widened sizes-smollm2-135m-float32 smollm2-135m $NEW --dtype float32 --per-kind 1 -n 48 \
    --decoders "$SIZES"
run_widened sizes-qwen2.5-0.5b-bfloat16 qwen2.5-0.5b $NEW --dtype bfloat16 --per-kind 1 -n 40 \
    --decoders "$SIZES"

# Never slower? Prompts that the matrix has not seen, greedy and sampled.
UNSEEN=(--suite builtin --suite "gsm8k=$DATA/gsm8k_test.jsonl" --suite "mbpp=$DATA/mbpp/question.jsonl")
for repeat in 1 2 3; do
    run "unseen-$repeat" $NEW "${UNSEEN[@]}" --per-kind 40 --decoders generate,generate-pld,auto
    run "unseen-sampled-$repeat" $NEW "${UNSEEN[@]}" --per-kind 40 --temp 0.8 \
        --decoders generate,generate-pld,auto
done

# Sampled, at other temperatures and at the cost of a larger model.
run sampled $NEW --per-kind 3 -n 96 --temp 0.8 --decoders generate,generate-pld,paper,auto,auto+graph
run temperature $NEW --per-kind 3 -n 96 --decoders generate,paper,auto,adaptive@ranked-7 \
    --sweep temperature=0.3,0.8,1.0
run_widened sampled-smollm2-135m-bfloat16 smollm2-135m $NEW --dtype bfloat16 --per-kind 1 -n 64 \
    --temp 0.8 --decoders generate,generate-pld,paper,auto

# Text that repeats little; public questions; k; cold and hot start.
run_widened low-redundancy smollm2-135m $NEW --dtype bfloat16 -n 64 \
    --suite bench/suites/low-redundancy.jsonl --decoders generate,generate-pld,paper,auto
run public $NEW --suite "spec-bench=$DATA/spec_bench/question.jsonl" --per-kind 5 \
    --decoders generate,generate-pld,prompt-lookup,paper,auto
run k $NEW --per-kind 2 -n 64 --decoders generate,paper,adaptive@ranked-15 --sweep k=4,8,12,16
run start $NEW --per-kind 2 -n 64 --decoders generate,paper,auto --sweep start=cold,hot

if wanted demo; then
    echo "== demo"
    token-recycling demo > bench/results/demo.txt
fi
