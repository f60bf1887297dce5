#!/usr/bin/env bash
# vLLM in three modes beside each other on one GPU (see gpu_vllm.py), in about five minutes.
#   lab/gpu_vllm.sh OUT PACKED SITE [SHAPE]  PACKED: a folder of gpu_model.py; SITE: a folder with vLLM
#   lab/gpu_vllm.sh OUT --dry-run            on a CPU: plain vLLM in Triton's interpreter, from build/vllm
# SITE is for PYTHONPATH: on a machine without a network nothing can be installed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 packed=$2 site=${3:-} shape=${4:-llama-8b}
modes=(plain ngram_gpu ours)
mkdir -p "$out"
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=WARNING
if [ "$packed" = --dry-run ]; then
    export PYTHONPATH=tests/engines:build/triton:lab LD_PRELOAD=$PWD/build/vllm/lib/libiomp5.so OMP_NUM_THREADS=2 NEW=4
    export VLLM_CPU_KVCACHE_SPACE=1 TRITON_INTERPRET=1
    export ENGINE='{"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128, "enforce_eager": true, "kv_cache_memory_bytes": 67108864}'
    python=(build/vllm/bin/python -c 'import runpy, sys; import v2_on_cpu; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")')
    checkpoint=src/token_recycling/demo_model prompts=$out/prompts.json
    echo '[[5, 6, 7, 8], [9, 10, 5, 6], [11, 12, 13], [4, 5, 6, 4, 5]]' >"$prompts"
else
    export PYTHONPATH=$site:src:lab TOKEN_RECYCLING_ANY_VERSION=1 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 TORCHINDUCTOR_COMPILE_THREADS=4
    python=(python3) checkpoint=/dev/shm/wide prompts=/dev/shm/prompts.json
    nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
    [ -d "$checkpoint" ] || python3 -c 'import sys; from gpu_model import save_widened; save_widened(*sys.argv[1:])' "$packed" "$shape" >"$out/widen.log" 2>&1
fi
ready=()
for mode in "${modes[@]}"; do ready+=("$out/ready.$mode"); done
rm -f "${ready[@]}"
for mode in "${modes[@]}"; do
    others=()
    for file in "${ready[@]}"; do [ "$file" = "$out/ready.$mode" ] || others+=("$file"); done
    (
        timeout "${LIMIT:-480}" "${python[@]}" lab/gpu_vllm.py serve "$mode" "$checkpoint" "$prompts" "$out/$mode.json" \
            "$out/ready.$mode" "${others[@]}" >"$out/$mode.log" 2>&1
        echo "== $mode: exit $? after $SECONDS s"
        touch "$out/ready.$mode" # one that failed does not hold up the others
    ) &
done
wait
for mode in "${modes[@]}"; do tail -n 4 "$out/$mode.log"; done
"${python[@]}" lab/gpu_vllm.py compare "$out"
