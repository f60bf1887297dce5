"""What gpu_vllm.py and gpu_sglang.py have found, relative to plain decoding.

python lab/gpu_compare.py FOLDER    of plain.json, ngram_gpu.json, …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

KINDS = ("chat", "random", "seeds")


def compare(folder: Path) -> None:
    """Print ratios to plain decoding, and how many texts are the same."""
    files = (file for file in folder.glob("*.json") if file.name != "prompts.json")
    found = {file.stem: json.loads(file.read_text()) for file in sorted(files)}
    plain = found["plain"]
    for mode, its in found.items():
        for kind in KINDS:
            for load, figures in its.get(kind, {}).items():
                base = plain[kind].get(load)
                if base is None:
                    continue
                texts = list(zip(figures["texts"], base["texts"]))
                rate = figures["tokens_per_s"]
                print(
                    f"{mode:10} {kind:7} {load:>3} requests {rate:8.1f} tokens/s "
                    f"{rate / base['tokens_per_s']:.2f}x, "
                    f"{figures['mat']:.2f} tokens a verified step, "
                    f"{sum(a == b for a, b in texts)} of {len(texts)} texts those of plain"
                )


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
