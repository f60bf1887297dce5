"""Measure steps as graphs on a GPU: against the memory's bandwidth, by nodes, by context, by tree.

python bench/gpu_suite.py [--models NAME,…] [--dtypes float16,…] [--parts NAME,…] --out FILE.json
python bench/gpu_suite.py --dry-run            the same on a CPU, with a tiny model

The models are the bundled one widened to real shapes: its text, at their cost. Every part writes
its figures as soon as it has them; what fails is written down with its reason, and the rest
follows. Parts: exact (graphs against the eager loop), costs (a step by nodes and context, with the
plain step against bytes / bandwidth), speeds (tokens per second, side by side, in turns), phases
(where a step's time goes), kernels (ways to attend to a tree and to take the k best logits).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gpu_kernels
import torch

from token_recycling import TokenRecycling
from token_recycling.bench.compare import plain_generate
from token_recycling.bench.prompts import DEMO
from token_recycling.bench.widen import widen
from token_recycling.drafters import AdaptiveDrafter, AnyDrafter, NoDrafter, PaperDrafter
from token_recycling.files import write_text
from token_recycling.graph import decoder
from token_recycling.graph.decoder import GraphRunner
from token_recycling.graph.step import GraphStep
from token_recycling.machine import describe, synchronize
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.sequence import Sequence
from token_recycling.text import as_conversation, encode
from token_recycling.tree import TreeTemplate, chains

MODELS = ("qwen2.5-0.5b", "llama-7b", "llama-8b")
TINY = dict(
    hidden_size=384,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=8192,
    tie_word_embeddings=False,
)
NODES = (1, 16, 32, 64, 81)
CONTEXTS = (256, 1024, 2048, 8192)
REPEATS = 30
PARTS = ("exact", "costs", "speeds", "phases", "kernels")
IDLE = [False]  # a row that has ended costs what others do, and its context does not grow
NEAR = 0.05  # a gap of logits that half precision may turn round


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of a run, by the device's own clock where it has one."""
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return median(found)


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second read by the fastest of a few ways to read ``size`` bytes once."""
    data = torch.ones(size // 4, device=device)
    out = torch.empty_like(data)
    with torch.no_grad():
        ways = {
            size: lambda: data.sum(),
            2 * size: lambda: out.copy_(data),
        }
        for way in ways.values():
            way()
        return max(count / seconds_of(way, device, 10) for count, way in ways.items())


class Bench:
    """One model, and what is measured of it."""

    def __init__(self, path: str, dtype: str, device: torch.device, contexts: tuple[int, ...]):
        self.device, self.contexts = device, contexts
        self.recycler = TokenRecycling.from_pretrained(path, device=device, dtype=dtype)
        self.target = self.recycler.target
        config = self.target.config
        vocab = self.target.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab, (max(contexts) + 1,), generator=generator).tolist()
        self.random = AdjacencyMatrix(vocab, 8)
        self.random.update(
            torch.arange(vocab), torch.randint(vocab, (vocab, 8), generator=generator)
        )
        weights = sum(w.numel() * w.element_size() for w in self.recycler.model.parameters())
        embedding = self.recycler.model.get_input_embeddings().weight
        if not config.tie_word_embeddings:
            weights -= embedding.numel() * embedding.element_size()
        self.weight_bytes = weights
        heads, size = config.num_key_value_heads, config.head_dim
        self.kv_bytes = 2 * config.num_hidden_layers * heads * size * embedding.element_size()
        self.prompts = [
            encode(self.recycler.tokenizer, as_conversation(self.recycler.tokenizer, [p], False))
            for p in DEMO
        ]

    def runner(self, drafter: AnyDrafter, nodes: int, context: int) -> GraphRunner:
        """Compile a step that stands behind ``context`` random tokens."""
        slots = decoder.slots_for(context + nodes)
        self.target.prefill([self.tokens[:context]])
        runner = GraphRunner(GraphStep(self.target, drafter, 1, slots, nodes))
        with torch.no_grad():
            runner.step.begin([Sequence(self.tokens[: context + 1])])
        return runner

    def drafter(self, nodes: int) -> AnyDrafter:
        """A drafter whose drafts have ``nodes`` nodes with the root, from random rows."""
        if nodes == 1:
            return NoDrafter()
        return PaperDrafter(self.random, TreeTemplate.load(f"ranked-{nodes - 1}", self.random.k))

    def costs(self, speed: float) -> dict[str, Any]:
        """Seconds of a captured step by nodes and context."""
        rows = []
        for context in self.contexts:
            plain = 0.0
            for nodes in NODES:
                runner = self.runner(self.drafter(nodes), nodes, context)
                for _ in range(3):
                    runner.launch(IDLE)()
                seconds = seconds_of(partial(runner.launch, IDLE), self.device, REPEATS)
                synchronize(self.device)
                plain = plain or seconds
                floor = (self.weight_bytes + context * self.kv_bytes) / speed
                rows.append(
                    {
                        "context": context,
                        "nodes": nodes,
                        "seconds": seconds,
                        "c": seconds / plain,
                        "floor": floor,
                        "of bandwidth": floor / seconds,
                    }
                )
        return {"weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes, "rows": rows}

    def exact(self, new_tokens: int) -> dict[str, Any]:
        """Compare the text of graphs with that of the eager loop, and with itself."""
        found = {"prompts": len(self.prompts), "same": 0, "again": 0, "near ties": 0}
        ways = {
            name: TokenRecycling(
                self.recycler.model, self.recycler.tokenizer, tree="ranked-31", graph=graph
            )
            for name, graph in (("graph", True), ("eager", False))
        }
        for prompt in self.prompts:
            answers = {
                name: way.generate(prompt, max_new_tokens=new_tokens).token_ids
                for name, way in ways.items()
            }
            state = ways["graph"].matrix.state()
            first = ways["graph"].generate(prompt, max_new_tokens=new_tokens).token_ids
            ways["graph"].matrix.restore(state)
            again = ways["graph"].generate(prompt, max_new_tokens=new_tokens).token_ids
            found["again"] += first == again
            same = answers["graph"] == answers["eager"]
            found["same"] += same
            if not same:
                found["near ties"] += self._near(prompt, answers["graph"], answers["eager"])
        return found

    def _near(self, prompt: list[int], a: list[int], b: list[int]) -> bool:
        """True where the two texts part at logits that lie close together."""
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is None:
            return False
        logits = self.target.prefill([prompt + a[:at]])[0].float()
        return bool((logits[a[at]] - logits[b[at]]).abs() < NEAR)

    def speeds(self, new_tokens: int, rounds: int) -> dict[str, Any]:
        """Tokens per second of whole answers, every way in turn, prompt by prompt."""
        model, tokenizer = self.recycler.model, self.recycler.tokenizer

        def ours(**options: Any) -> Callable[[list[int]], list[int]]:
            recycler = TokenRecycling(model, tokenizer, graph=True, **options)

            def answer(prompt: list[int]) -> list[int]:
                recycler.forget_context()
                return recycler.generate(prompt, max_new_tokens=new_tokens).token_ids

            return answer

        def generate(**options: Any) -> Callable[[list[int]], list[int]]:
            options = {"max_new_tokens": new_tokens, **options}
            return lambda prompt: plain_generate(self.recycler, prompt, options)

        ways = {
            "generate": generate(),
            "generate, prompt lookup": generate(prompt_lookup_num_tokens=10),
            "generate, static compiled cache": generate(cache_implementation="static"),
            "plain graph": ours(drafter="none"),
            "paper": ours(drafter="paper", tree="paper"),
            **{f"adaptive {n}": ours(tree=f"ranked-{n}") for n in (15, 31, 63, 80)},
            "auto": ours(),
        }
        taken: dict[str, list[list[float]]] = {name: [] for name in ways}
        failed: dict[str, str] = {}
        for turn in range(rounds + 1):
            for prompt in self.prompts:
                for name, way in ways.items():
                    if name in failed:
                        continue
                    try:
                        synchronize(self.device)
                        begin = time.perf_counter()
                        tokens = way(prompt)
                        synchronize(self.device)
                    except Exception as error:
                        failed[name] = str(error)[:300]
                        continue
                    if turn:  # the first round compiles and warms up
                        taken[name].append([len(tokens), time.perf_counter() - begin])
        return {"taken": taken, "failed": failed}

    def phases(self, context: int) -> dict[str, Any]:
        """Time of the whole step, of the model alone in it, and the longest kernels."""
        found: dict[str, Any] = {}
        for nodes in (16, 32, 81):
            matrix = self.random.clone()
            drafter = AdaptiveDrafter(matrix, nodes - 1)
            runner = self.runner(drafter, nodes, context)
            for _ in range(3):
                runner.launch(IDLE)()
            whole = seconds_of(partial(runner.launch, IDLE), self.device, REPEATS)
            model = seconds_of(self._model_only(nodes, context), self.device, REPEATS)
            found[str(nodes)] = {"step": whole, "model": model, "rest": 1 - model / whole}
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    runner.launch(IDLE)()
            events = profile.key_averages()
            key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            longest = sorted(events, key=lambda event: -getattr(event, key))[:15]
            found[str(nodes)]["longest, us a step"] = {
                event.key[:100]: getattr(event, key) / 5 for event in longest
            }
        return found

    def kernels(self, contexts: tuple[int, ...]) -> dict[str, Any]:
        """Ways to attend and to take the k best logits, with this model's heads and vocabulary."""
        config, dtype = self.target.config, self.target.dtype
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        seconds = partial(seconds_of, device=self.device, repeats=REPEATS)
        return {
            "attention": gpu_kernels.attention(heads, dtype, self.device, seconds, contexts),
            "top-k": gpu_kernels.top_k(self.target.vocab_size, dtype, self.device, seconds),
        }

    def _model_only(self, nodes: int, context: int) -> Callable[[], Any]:
        """The forward of a chain of ``nodes`` as a graph of its own."""
        self.target.prefill([self.tokens[:context]])
        slots = decoder.slots_for(context + nodes)
        step = GraphStep(self.target, NoDrafter(), 1, slots, 1)
        step.cache.take(self.target.cache)
        tokens = torch.tensor([self.tokens[:nodes]], device=self.device)
        draft = chains(tokens)
        forward = torch.compile(lambda: step._verify(draft), fullgraph=True)
        with torch.no_grad():
            for _ in range(3):
                forward()
            if self.device.type != "cuda":
                return torch.no_grad()(forward)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
        return graph.replay


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for widened models; kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry-run goes through everything on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    contexts = (24, 40) if dry else CONTEXTS
    new_tokens, rounds = (12, 1) if dry else (options.new_tokens, options.rounds)
    models = ["tiny"] if dry else options.models.split(",")
    dtypes = ["float32"] if dry else options.dtypes.split(",")
    if dry:
        decoder.BACKEND = "aot_eager"  # captured, not compiled
    # What is measured as a graph must be one.
    warnings.filterwarnings("error", message="decoding without a graph")
    began = time.perf_counter()
    speed = bandwidth(device, 2**24 if dry else 2**32)
    found: dict[str, Any] = {
        "machine": describe(device),
        "dry run": dry,
        "bandwidth": speed,
        "models": {},
    }

    def note(*names: str, value: Any) -> None:
        place = found["models"]
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = value
        found["seconds"] = time.perf_counter() - began
        print(f"{found['seconds']:6.0f} s  {' '.join(names)}", flush=True)
        if options.out:
            write_text(options.out, json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for model in models:
            for dtype in dtypes:
                path = work / f"{model}-{dtype}"
                if not path.exists():
                    shape = model
                    if model == "tiny":
                        shape = str(work / "tiny.json")
                        write_text(Path(shape), json.dumps(TINY))
                    widen("bundled", shape, path, dtype=dtype)
                note(model, dtype, "widened", value=True)
                torch._dynamo.reset()  # variants of the step are counted over all models
                bench = Bench(str(path), dtype, device, contexts)
                parts: dict[str, Callable[[], Any]] = {
                    "exact": partial(bench.exact, new_tokens),
                    "costs": partial(bench.costs, speed),
                    "speeds": partial(bench.speeds, new_tokens, rounds),
                    "phases": partial(bench.phases, contexts[1]),
                    "kernels": partial(bench.kernels, contexts if dry else gpu_kernels.CONTEXTS),
                }
                for part in options.parts.split(","):
                    try:
                        note(model, dtype, part, value=parts[part]())
                    except Exception:
                        note(model, dtype, part, value={"failed": traceback.format_exc()[-2000:]})
                    bench.recycler.forget_context()
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                del bench, parts  # before the next model is loaded
    print(table(found))
    parts = [
        part
        for types in found["models"].values()
        for one in types.values()
        for part in one.values()
    ]
    if any(isinstance(part, dict) and isinstance(part.get("failed"), str) for part in parts):
        raise SystemExit(1)


def table(found: dict[str, Any]) -> str:
    """Return the figures that matter as Markdown."""
    lines = [f"bandwidth {found['bandwidth'] / 1e9:.0f} GB/s on {found['machine']['device_name']}"]
    for model, dtypes in found["models"].items():
        for dtype, parts in dtypes.items():
            lines += ["", f"{model}, {dtype}", ""]
            for name, part in parts.items():
                if isinstance(part, dict) and "failed" in part and part["failed"]:
                    lines.append(f"{name} failed: {str(part['failed'])[-300:]}")
            if "rows" in parts.get("costs", {}):
                lines += ["| context | nodes | ms | c | of bandwidth |", "|---|---|---|---|---|"]
                lines += [
                    f"| {r['context']} | {r['nodes']} | {r['seconds'] * 1e3:.2f} | {r['c']:.2f} | "
                    f"{r['of bandwidth']:.0%} |"
                    for r in parts["costs"]["rows"]
                ]
            if "taken" in parts.get("speeds", {}):
                rates = {
                    name: sum(t for t, _ in taken) / sum(s for _, s in taken)
                    for name, taken in parts["speeds"]["taken"].items()
                    if taken
                }
                lines += ["", "| way | tokens/s | of generate |", "|---|---|---|"]
                base = rates.get("generate", 1.0)
                lines += [f"| {n} | {r:.1f} | {r / base:.2f}x |" for n, r in rates.items()]
            for name in ("attention", "top-k"):
                lines += kernel_table(name, parts.get("kernels", {}).get(name, []))
            if "same" in parts.get("exact", {}):
                lines += ["", f"graphs against the eager loop: {parts['exact']}"]
            for nodes, row in parts.get("phases", {}).items():
                if isinstance(row, dict):
                    lines.append(
                        f"{nodes} nodes: step {row['step'] * 1e3:.2f} ms, "
                        f"of it not the model {row['rest']:.1%}"
                    )
    return "\n".join(lines)


def kernel_table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds of every way, a line for each size."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    if not ways:
        return []
    sizes: dict[tuple[Any, int], dict[str, str]] = {}
    for row in rows:
        text = f"{row['seconds'] * 1e6:.0f}" if "seconds" in row else "failed"
        sizes.setdefault((row.get("context", ""), row["nodes"]), {})[row["way"]] = text
    head = f"| {name}: context | nodes | {' | '.join(f'{way}, us' for way in ways)} |"
    lines = ["", head, "|---" * (2 + len(ways)) + "|"]
    for (context, nodes), found in sizes.items():
        lines.append(f"| {context} | {nodes} | {' | '.join(found[way] for way in ways)} |")
    return lines


if __name__ == "__main__":
    main()
