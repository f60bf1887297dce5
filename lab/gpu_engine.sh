#!/usr/bin/env bash
# An engine in several modes beside each other on one GPU (see gpu_engine.py), in about six minutes.
#   lab/gpu_engine.sh ENGINE OUT PACKED SITE [SHAPE]  vllm or sglang; PACKED: a folder of gpu_model.py; SITE: one with the engine
#   lab/gpu_engine.sh ENGINE OUT --dry-run            on a CPU, from build/ENGINE, with what its tests replace
# SITE is for PYTHONPATH: on a machine without a network nothing can be installed.
set -uo pipefail
cd "$(dirname "$0")/.."
engine=$1 out=$2 packed=$3 site=${4:-} shape=${5:-llama-8b}
case $engine in
    vllm) modes=(plain ngram_gpu chain ours) ;;
    sglang) modes=(plain ngram ours) ;;
    *) echo "ENGINE is $engine; it must be vllm or sglang" >&2; exit 2 ;;
esac
mkdir -p "$out"
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=WARNING
if [ "$packed" = --dry-run ]; then
    export OMP_NUM_THREADS=2 NEW=4
    checkpoint=src/token_recycling/demo_model prompts=$out/prompts.json
    echo '[[5, 6, 7, 8], [9, 10, 5, 6], [11, 12, 13], [4, 5, 6, 4, 5]]' >"$prompts"
    if [ "$engine" = vllm ]; then
        export PYTHONPATH=tests/engines:build/triton:lab LD_PRELOAD=$PWD/build/vllm/lib/libiomp5.so VLLM_CPU_KVCACHE_SPACE=1 TRITON_INTERPRET=1
        export OURS='{"mode": "tree", "num_speculative_tokens": 6}'
        export ENGINE='{"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128, "enforce_eager": true, "kv_cache_memory_bytes": 67108864}'
        python=(build/vllm/bin/python -c 'import runpy, sys; import v2_on_cpu as v; v.attend_as_on_a_gpu("none"); v.use_few_lanes(); v.leave_top_k_to_pytorch(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")')
    else
        export PYTHONPATH=$PWD/tests/engines/sgl_kernel_on_cpu:$PWD/tests/engines:$PWD/lab SGLANG_USE_CPU_ENGINE=1
        export ENGINE='{"device": "cpu", "dtype": "float32", "attention_backend": "intel_amx", "max_total_tokens": 4096, "max_running_requests": 4, "context_length": 256, "disable_cuda_graph": true}'
        python=(build/sglang/bin/python)
    fi
else
    export PYTHONPATH=$site:src:kernels/src:lab TOKEN_RECYCLING_ANY_VERSION=1 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 TORCHINDUCTOR_COMPILE_THREADS=4
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
        timeout "${LIMIT:-480}" "${python[@]}" lab/gpu_engine.py serve "$engine" "$mode" "$checkpoint" "$prompts" "$out/$mode.json" \
            "$out/ready.$mode" "${others[@]}" >"$out/$mode.log" 2>&1
        echo "== $mode: exit $? after $SECONDS s"
        touch "$out/ready.$mode" # one that failed does not hold up the others
    ) &
done
wait
for mode in "${modes[@]}"; do tail -n 4 "$out/$mode.log"; done
"${python[0]}" lab/gpu_engine.py compare "$out"
