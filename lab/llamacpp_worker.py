"""Answers prompts with llama.cpp, for ``llamacpp.py``; runs in an environment with xllamacpp.

    python lab/llamacpp_worker.py FILE THREADS CONTEXT SPECULATION

Reads lines of JSON (``prompt``, ``tokens``) and writes lines of JSON with the timings of the server
in the package, and the resident memory of this process in bytes. With ``best`` it writes so many
most likely tokens after the prompt instead, as pairs of token and log probability; what the prompt
shares with the one before is not read again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import xllamacpp

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    """Answer until the input ends."""
    file, threads, context, speculation = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library writes to the standard output too
    before = resident()
    options = xllamacpp.CommonParams()
    options.model.path = file
    options.n_ctx, options.n_parallel = int(context), 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(threads)
    options.cache_ram_mib = 0
    if speculation != "none":
        options.speculative.types = [getattr(xllamacpp.common_speculative_type, speculation)]
    server = xllamacpp.Server(options)
    for line in sys.stdin:
        asked = json.loads(line)
        request = {
            "prompt": asked["prompt"],
            "max_tokens": asked["tokens"],
            "temperature": 0,
            "ignore_eos": asked.get("ignore_eos", False),
            "cache_prompt": "best" in asked,
            "logprobs": asked.get("best"),
        }
        found = server.handle_completions(request)
        found = found if isinstance(found, dict) else json.loads(found)
        choice = found["choices"][0]
        told: object = {
            "timings": found["timings"],
            "text": choice["text"],
            "resident": resident() - before,
        }
        if "best" in asked:
            ranked = choice["logprobs"]["content"][0]["top_logprobs"]
            told = [(one["id"], one["logprob"]) for one in ranked]
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
