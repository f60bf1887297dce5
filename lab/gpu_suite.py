"""Measure captured steps on a GPU; one command, which continues where it was stopped.

python lab/gpu_suite.py --out FILE.json [--models NAME,…] [--dtypes NAME,…] [--parts NAME,…]
python lab/gpu_suite.py --dry-run            the same on a CPU, with a tiny model

A model is a shape: "random-llama-8b" has random weights, "llama-7b" is the bundled model widened to
that shape, which answers with its text at the shape's cost. Parts, each for every model and dtype:

  launches    operations of a step outside the model's forward
  identity    text of captured steps against the eager loop's and generate's; near ties
  syncs       how often the host waits, per step
  costs       seconds of a step by nodes and context, against bytes read / bandwidth
  compiled    code by Inductor against plain capture
  drafting    kernels of the device against the host's
  phases      where the time of a step goes
  kernels     ways to attend to a tree, and to take the k best logits
  warm        rows of all tokens, filled by the model
  speeds      tokens per second, side by side, in turns
  engines     the same in vLLM and SGLang, where installed (widened models only)

In float32 only identity is measured; of random weights everything but identity, speeds, engines.
Every part is a process of its own, part by part in the order of --parts. It writes its figures as
soon as it has them, starts nothing new after --minutes, and is left out when FILE.json has it. What
fails is written down with its reason, and the rest follows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:  # Triton reads this when the kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine_bench.load import ENGINES, WARM_UP, Load
from engine_bench.measure import measure, summary
from gpu_parts import DRAFTED, PARTS, RANDOM, REPEATS, Bench, Deadline, bandwidth, load
from gpu_table import table
from token_recycling.errors import TokenRecyclingError
from token_recycling.graph import runner
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe
from widen import SHAPES, widen

MODELS = ("random-qwen2.5-0.5b", "random-llama-1b", "random-llama-8b", "llama-1b", "llama-7b")
DTYPES = ("bfloat16", "float32")
EXACT = ("identity",)  # what is measured in float32
TEXT = ("identity", "speeds", "engines")  # what needs text
# In the order of what one wants to know first.
ALL = tuple(dict.fromkeys(("identity", "speeds", "costs", *PARTS, "engines")))
CONTEXTS = (256, 2048, 8192, 32768)
TINY = "tiny"
SHAPES[TINY] = dict(
    hidden_size=384,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=8192,
    tie_word_embeddings=False,
)
DRY: dict[str, Any] = dict(
    contexts=(24, 40),
    kernel_contexts=(24, 40),
    drafted=(5,),
    prompts=2,
    new_tokens=12,
    rounds=1,
    repeats=3,
)
SAME = ("device_name", "torch", "transformers")  # of figures in one file
ENGINE_SECONDS = 240.0  # of one process
LOAD_SECONDS = 120.0  # to start a process and to make and load a model, beside a part


class Figures:
    """What was measured, in a file that is written after every part."""

    def __init__(self, path: Path | None, machine: dict[str, Any], dry: bool) -> None:
        """Continue ``path`` if it is of the same machine and versions.

        Raises:
            SystemExit: it is not.
        """
        self.path, self.began, self.machine = path, time.perf_counter(), machine
        self.found: dict[str, Any] = {"machine": machine, "dry run": dry, "seconds": 0.0}
        self.found |= {"models": {}, "commits": {}}
        if path is not None and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            same = all(before["machine"][name] == machine[name] for name in SAME)
            if not same or before["dry run"] != dry:
                raise SystemExit(f"{path} was measured elsewhere or with other versions; move it")
            self.found = before
        self._before = self.found["seconds"]

    def has(self, model: str, dtype: str, part: str) -> bool:
        """Return True if a part was measured and has not failed."""
        value = self.found["models"].get(model, {}).get(dtype, {}).get(part)
        return value is not None and "failed" not in value

    def note(self, model: str, dtype: str, part: str, value: dict[str, Any]) -> None:
        """Add a part's figures and write the file."""
        self.found["models"].setdefault(model, {}).setdefault(dtype, {})[part] = value
        self.found["commits"][f"{model} {dtype} {part}"] = self.machine["commit"]
        self.found["seconds"] = self._before + time.perf_counter() - self.began
        state = "failed" if "failed" in value else "done"
        print(f"{self.found['seconds']:6.0f} s  {model} {dtype} {part} {state}", flush=True)
        if self.path:
            write_text(self.path, json.dumps(self.found, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        """True if any part failed."""
        types = (dtypes for dtypes in self.found["models"].values())
        parts = (part for one in types for named in one.values() for part in named.values())
        return any("failed" in part for part in parts)


def wanted(model: str, dtype: str, parts: list[str]) -> list[str]:
    """Return those of ``parts`` that say something about a model."""
    if dtype == "float32" and model.removeprefix(RANDOM) != TINY:
        parts = [part for part in parts if part in EXACT]
    if model.startswith(RANDOM):
        parts = [part for part in parts if part not in TEXT]
    return parts


def engines(source: str, bench: Bench, dtype: str) -> dict[str, Any]:
    """Tokens per second in vLLM and SGLang, one request at a time."""
    found: dict[str, Any] = {}
    for engine in ENGINES:
        if find_spec(engine) is None:
            found[engine] = "not installed"
            continue
        load = Load(
            model=source,
            mode="plain",
            arguments={"dtype": dtype},
            warm_up=bench.prompts[:WARM_UP],
            prompts=bench.prompts,
            new_tokens=bench.new_tokens,
            temperature=0.0,
            concurrency=[1],
            chain=6,
            tree=31,
        )
        modes = ["plain", "ngram", "chain" if engine == "vllm" else "tree"]
        try:
            lives = measure(engine, load, modes, bench.rounds, limit=ENGINE_SECONDS)
        except TokenRecyclingError as error:
            found[engine] = str(error)
        else:
            found[engine] = summary(lives)
    return found


def in_processes(
    options: argparse.Namespace, models: list[str], dtypes: list[str], parts: list[str]
) -> int:
    """Measure every part in a process of its own; return an exit code.

    A part that hangs, or breaks its CUDA context, costs its own time and nothing else.
    """
    out = options.out or Path(tempfile.mkdtemp()) / "gpu.json"
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for part in parts:
            for model, dtype in product(models, dtypes):
                if part not in wanted(model, dtype, parts):
                    continue
                if Figures(out, describe(device), dry=False).has(model, dtype, part):
                    continue
                command = [sys.executable, __file__, "--in-process", "--out", out, "--work", work]
                command += ["--models", model, "--dtypes", dtype, "--parts", part]
                command += ["--new-tokens", options.new_tokens, "--rounds", options.rounds]
                command += ["--minutes", options.minutes]
                limit = 60 * options.minutes + LOAD_SECONDS
                try:
                    ended = subprocess.run(list(map(str, command)), timeout=limit).returncode
                    reason = f"exit code {ended}"
                except subprocess.TimeoutExpired:
                    reason = f"took longer than {limit:.0f} s"
                figures = Figures(out, describe(device), dry=False)
                if part not in figures.found["models"].get(model, {}).get(dtype, {}):
                    figures.note(model, dtype, part, {"failed": reason})
    figures = Figures(out, describe(device), dry=False)
    print(table(figures.found))
    return int(figures.failed)


def import_kernels() -> None:
    """Define the kernels of the device, if Triton is installed."""
    if find_spec("triton"):
        import token_recycling.drafting.on_device
        import token_recycling.graph.kernels  # noqa: F401


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--parts", default=",".join(ALL))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=7.0, help="most minutes of a part")
    parser.add_argument("--work", type=Path, help="folder for widened models; kept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--in-process", action="store_true", help="not a process for each part")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry-run goes through everything on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    models = [TINY, RANDOM + TINY] if dry else options.models.split(",")
    dtypes = ["float32"] if dry else options.dtypes.split(",")
    parts = options.parts.split(",")
    for given, known in ((parts, ALL), ([m.removeprefix(RANDOM) for m in models], SHAPES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    if not (dry or options.in_process):
        sys.exit(in_processes(options, models, dtypes, parts))
    if dry:
        runner.BACKEND = "aot_eager"  # traced, no code generated
        # The interpreter is slow: only parts about the kernels themselves use it.
        import_kernels()
        del os.environ["TRITON_INTERPRET"]
    # What is measured as a graph must be one.
    warnings.filterwarnings("error", message="decoding without a graph")
    figures = Figures(options.out, describe(device), dry)
    if "bandwidth" not in figures.found:
        figures.found["bandwidth"] = bandwidth(device, 2**24 if dry else 2**32)
    sizes: dict[str, Any] = dict(
        contexts=CONTEXTS,
        kernel_contexts=CONTEXTS,
        drafted=DRAFTED,
        prompts=8,
        repeats=REPEATS,
        new_tokens=options.new_tokens,
        rounds=options.rounds,
    )

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for model in models:
            for dtype in dtypes:
                missing = [
                    part
                    for part in wanted(model, dtype, parts)
                    if not figures.has(model, dtype, part)
                ]
                if not missing:
                    continue
                source = model
                if not model.startswith(RANDOM):
                    source = str(work / f"{model}-{dtype}")
                    if not Path(source).exists():
                        shape = model
                        if model == TINY:
                            shape = str(work / "tiny.json")
                            write_text(Path(shape), json.dumps(SHAPES[TINY]))
                        widen("bundled", shape, source, dtype=dtype)
                loaded = load(source, dtype, device)
                bench = Bench(
                    *loaded, device, speed=figures.found["bandwidth"], **(DRY if dry else sizes)
                )
                del loaded
                for part in missing:
                    try:
                        if part == "engines":
                            value = engines(source, bench, dtype)
                        else:
                            value = PARTS[part](bench, Deadline(60 * options.minutes))
                    except Exception:
                        value = {"failed": traceback.format_exc()[-2000:]}
                    figures.note(model, dtype, part, value)
                    bench.recycler.forget_context()
                    torch._dynamo.reset()
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                del bench  # before the next model is loaded
    print(table(figures.found))
    if figures.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
