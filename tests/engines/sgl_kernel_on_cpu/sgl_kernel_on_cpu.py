"""Test fixture: a plug-in of SGLang that makes its tree attention for CPUs run without AMX."""

import os
import sys


def register():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    # Without AMX SGLang falls back to this one, which takes no trees.
    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    try:
        from token_recycling.integrations.sglang import algorithm
    except ImportError:
        return
    algorithm.BACKENDS = (*algorithm.BACKENDS, "torch_native")
    if fault := os.environ.get("TOKEN_RECYCLING_TEST_FAULT"):
        import mutations

        try:
            mutations.apply_sglang(fault)
        except Exception as error:  # SGLang would only log it, and run without the fault
            print(f"the fault {fault!r} cannot be made: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
