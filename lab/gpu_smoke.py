"""GPU smoke test: is the text right and how fast is it; six minutes, the most wanted first.

python lab/gpu_smoke.py OUT.json [--model FOLDER] [--shape llama-8b] [--parts=NAME,…] [--seconds S]
python lab/gpu_smoke.py OUT.json --dry-run      on a CPU, with the bundled model

FOLDER is a model packed by ``gpu_model.py``, which is widened to the shape on the GPU (as it is
without a shape); without a folder weights are random, for parts that need no text. Parts:

  headline   tokens per second and texts of every way to decode, in turn, prompt by prompt
  static     ``generate`` with a static cache, compiled
  exact      the model unwidened, in float32: greedy, sampled and batched texts
  batches    tokens per second of all prompts at once
  costs      seconds of a captured step by context and tokens
  linear     seconds of the model's matrix products by tokens, and which share their bits
  profile    the longest kernels of steps

All parts share a process. Where one breaks its CUDA context, the process starts anew with the next.
The file is written after every part, and within ``headline`` after every prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from gpu_model import POSITIONS, build
from gpu_steps import Steps
from script import run
from token_recycling import TokenRecycling
from token_recycling.bench.compare import plain_generate, timed
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe, synchronize
from widen import SHAPES

PARTS = ("headline", "static", "exact", "batches", "costs", "linear", "profile")
FEW = 3  # prompts of slow ways: all but graphs
WARM_UP = 24  # tokens of the untimed first answer
Options = dict[str, Any]
# Ways to decode: options of a recycler, or of ``generate``.
GRAPHS: dict[str, Options] = {
    "graph, no drafts": {"drafter": "none", "graph": True},
    "graph, default": {"graph": True},
    **{f"graph, {n} nodes": {"nodes": n, "graph": True} for n in (7, 15, 31, 63)},
}
EAGER: dict[str, Options] = {
    "eager, no drafts": {"drafter": "none", "graph": False},
    "eager, default": {"graph": False},
}
HEADLINE = {"generate": {}} | {n: o for n, o in GRAPHS.items() if n != "graph, 7 nodes"} | EAGER
BATCHES = {name: GRAPHS[name] for name in list(GRAPHS)[:4]}
SAMPLED: Options = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


class Way:
    """A way to decode, which has learnt nothing at first."""

    def __init__(self, model: Any, name: str, options: Options) -> None:
        self.stock = options if name.startswith("generate") else None
        given = options if self.stock is None else {"drafter": "none", "graph": False}
        self.recycler = TokenRecycling(model, None, **given)
        self.device = self.recycler.target.device

    def answer(self, prompt: Any, tokens: int, **sampling: Any) -> dict[str, Any]:
        """Answer a prompt or a batch; return tokens, seconds and steps."""
        options = {"max_new_tokens": tokens, **sampling}
        if self.stock is not None:
            options |= self.stock
            found, seconds = timed(
                lambda: plain_generate(self.recycler, prompt, options), self.device
            )
            return {"tokens": found, "seconds": seconds}
        found, seconds = timed(lambda: self.recycler.generate(prompt, **options), self.device)
        one = isinstance(found, list)
        stats = self.recycler.stats if one else found.stats
        return {
            "tokens": [each.token_ids for each in found] if one else found.token_ids,
            "seconds": seconds,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "prefill": stats.prefill_seconds,
            "phases": stats.seconds,
        }

    def settle(self) -> dict[str, Any]:
        """Wait for kernels that are compiled in a thread; say which steps were captured."""
        graph = self.recycler.session._graph
        if graph is None:
            return {"graph": None}
        graph.pool.wait(30)
        runners = [(key, one.step.drafting.lag) for key, one in graph.pool._steps.items()]
        return {"graph": repr(runners)}  # the steps say what drafts


class Smoke:
    """A model, the prompts, and one method for each part.

    Args:
        model: at its shape.
        prompts: the last one warms up.
        folder: of the packed model; None: there is none.
        tokens: new tokens of an answer.
        end: when nothing new may begin, by ``perf_counter``.
    """

    def __init__(
        self, model: Any, prompts: list[list[int]], folder: Path | None, tokens: int, end: float
    ) -> None:
        self.model, self.prompts, self.folder = model, prompts, folder
        self.tokens, self.end = tokens, end
        self.device = next(model.parameters()).device
        self.steps = Steps(model, dry=self.device.type == "cpu")

    @property
    def over(self) -> bool:
        """True when nothing new may begin."""
        return time.perf_counter() > self.end

    def in_turn(
        self,
        ways: dict[str, Options],
        write: Callable[[Any], None],
        first: list[int],
        tokens: int,
    ) -> Any:
        """Answer every prompt in every way; return answers, warnings and what went wrong.

        Args:
            ways: by name.
            write: keeps the result so far.
            first: the untimed prompt.
            tokens: new tokens of its answer.
        """
        found: dict[str, Any] = {name: {"answers": [], "warnings": []} for name in ways}
        ready: dict[str, Way] = {}

        def attempt(call: Callable[..., None], name: str, *given: Any) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    call(name, *given)
                except Exception:
                    found[name]["failed"] = traceback.format_exc()[-1500:]
                    ready.pop(name, None)
            found[name]["warnings"] += sorted({str(one.message)[:300] for one in caught})

        def warm_up(name: str) -> None:
            begun = time.perf_counter()
            way = ready[name] = Way(self.model, name, ways[name])
            way.answer(first, tokens)
            found[name]["first"] = time.perf_counter() - begun
            way.settle()
            way.answer(first, tokens)  # finds kernels that the first did not wait for
            found[name] |= way.settle()
            found[name]["ready"] = time.perf_counter() - begun

        def answer(name: str, prompt: list[int]) -> None:
            found[name]["answers"].append(ready[name].answer(prompt, self.tokens))

        for name in ways:
            attempt(warm_up, name)
            print(name, {k: v for k, v in found[name].items() if k != "answers"}, flush=True)
            write(found)
        for number, prompt in enumerate(self.prompts[:-1]):
            for name in list(ready):
                if self.over:
                    return found
                if number < FEW or name.startswith("graph"):
                    attempt(answer, name, prompt)
            write(found)
        return found

    def headline(self, write: Callable[[Any], None]) -> Any:
        """Every way to decode."""
        return self.in_turn(HEADLINE, write, self.prompts[-1], WARM_UP)

    def static(self, write: Callable[[Any], None]) -> Any:
        """``generate`` with a static cache, which compiles the forward."""
        longest = max(self.prompts[:-1], key=len)
        ways = {"generate, static": {"cache_implementation": "static"}}
        return self.in_turn(ways, write, longest, self.tokens)

    def exact(self, write: Callable[[Any], None]) -> Any:
        """The small model in float32: texts of graphs, sampled ones and batches included."""
        if self.folder is None:
            return None
        model, questions = build(self.folder, None, "float32", self.device)
        prompts = [one["tokens"] for one in questions[:5]]
        found: dict[str, Any] = {}
        for name in ("generate", "graph, 31 nodes", "graph, no drafts", "eager, default"):
            way = Way(model, name, HEADLINE[name])
            texts = found[name] = {
                "greedy": [way.answer(one, 64)["tokens"] for one in prompts],
                "sampled": [way.answer(one, 64, **SAMPLED)["tokens"] for one in prompts],
            }
            if name != "generate":
                texts["again"] = [way.answer(one, 64)["tokens"] for one in prompts]
                texts["batch"] = way.answer(prompts, 64)["tokens"]
            for kind, own in list(texts.items()):
                wanted = found["generate"]["sampled" if kind == "sampled" else "greedy"]
                same = sum(a == b for a, b in zip(own, wanted))
                texts[f"{kind} as generate"] = f"{same} of {len(wanted)}"
            texts |= way.settle()
            print(name, {k: v for k, v in texts.items() if isinstance(v, str)}, flush=True)
        return found

    def batches(self, write: Callable[[Any], None]) -> Any:
        """All prompts as one batch: two answers to warm up, then every way in turn, three times."""
        prompts, ready, result = self.prompts[:-1], {}, {}
        for name, options in BATCHES.items():
            way = ready[name] = Way(self.model, name, options)
            result[name] = {"answers": []}
            for _ in range(2):
                way.answer(prompts, self.tokens)
                result[name] |= way.settle()
        for _ in range(3):
            for name, way in ready.items():
                measured = way.answer(prompts, self.tokens)
                result[name]["texts"] = texts = measured.pop("tokens")
                print(name, measured, flush=True)
                measured["tokens per second"] = sum(map(len, texts)) / measured["seconds"]
                result[name]["answers"].append(measured)
            write(result)
        return result


def table(found: dict[str, Any]) -> str:
    """Return the ways to decode as lines."""
    lines = []
    for part in ("headline", "static"):
        ways = found.get(part, {}).get("value") or {}
        texts = {name: [one["tokens"] for one in way["answers"]] for name, way in ways.items()}
        for name, way in ways.items():
            answers = way["answers"]
            if not answers:
                lines.append(f"{part:9} {name:26} {way.get('failed', 'nothing')[-200:]}")
                continue
            rates = [len(one["tokens"]) / one["seconds"] for one in answers]
            first = next(iter(texts))
            same = sum(a == b for a, b in zip(texts[first], texts[name]))
            line = f"{part:9} {name:26} {median(rates):7.1f} tokens/s, first {way['first']:5.1f} s"
            line += f", text as {first}: {same} of {len(answers)}"
            if steps := sum(one.get("steps", 0) for one in answers):
                made = sum(len(one["tokens"]) - 1 for one in answers)
                decoding = sum(sum(one["phases"].values()) for one in answers)
                line += f", MAT {made / steps:.2f}, {1e3 * decoding / steps:.2f} ms a step"
                line += f", {sum(one['drafted'] for one in answers) / steps:.1f} drafted"
            lines.append(line)
            lines += [f"          ! {one}" for one in sorted(set(way["warnings"]))]
    return "\n".join(lines)


def prepared(
    folder: Path | None, shape: str | None, dtype: str, device: torch.device
) -> tuple[Any, list[list[int]]]:
    """Return a model and its prompts."""
    if device.type == "cpu":
        model = TokenRecycling.from_pretrained(device="cpu").model
        return model, [list(range(5, 25)), list(range(9, 30)), [7, 8, 9]]
    if folder is None:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=POSITIONS)
        with device:
            kind = getattr(torch, dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
        return model, [list(range(100, 150))]
    model, questions = build(folder, shape, dtype, device)
    return model, [one["tokens"] for one in questions]


def main(
    out: Path,
    model: Annotated[Path | None, typer.Option(help="a packed model")] = None,
    shape: Annotated[str | None, typer.Option(help="to widen it to; omitted: as it is")] = None,
    dtype: str = "bfloat16",
    parts: Annotated[str, typer.Option(help="in this order")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="start nothing new after")] = 240.0,
    prompts: int = 7,
    tokens: Annotated[int, typer.Option(help="of an answer")] = 96,
    dry_run: bool = False,
) -> None:
    """Measure; the exit code is 1 where a part failed or was not reached."""
    end, device = time.perf_counter() + seconds, torch.device("cpu" if dry_run else "cuda")
    found: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    (ready, asked), taken = timed(lambda: prepared(model, shape, dtype, device), device)
    smoke = Smoke(ready, asked[: prompts + 1], model, 16 if dry_run else tokens, end)
    found.setdefault("machine", describe(device))
    found.setdefault("bandwidth", smoke.steps.speed)
    found.setdefault("model seconds", []).append(taken)
    if device.type == "cuda":
        found["cudnn version"] = torch.backends.cudnn.version()
    print(f"model ready after {taken:.1f} s, {smoke.steps.speed / 1e12:.2f} TB/s", flush=True)
    wanted = parts.split(",")
    for part in wanted:
        if part in found or smoke.over:
            continue
        begun = time.perf_counter()

        def write(value: Any, part: str = part, begun: float = begun, **more: Any) -> None:
            found[part] = {"seconds": time.perf_counter() - begun, "value": value, **more}
            if device.type == "cuda":
                found[part]["memory"] = torch.cuda.max_memory_allocated()
            write_text(out, json.dumps(found) + "\n")

        write(None)
        try:
            measured = getattr(smoke.steps, part, None)
            write(measured() if measured else getattr(smoke, part)(write))
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
            write(found[part].get("value"), failed=traceback.format_exc()[-2500:])
        print(f"== {part}: {found[part]['seconds']:.1f} s", flush=True)
        try:
            synchronize(device)
        except RuntimeError:  # a kernel has broken the CUDA context
            left = f"--seconds={end - time.perf_counter():.0f}"
            os.execv(sys.executable, [sys.executable, *sys.argv, left])
    print(table(found))
    raise typer.Exit(int(any("failed" in found.get(part, ["failed"]) for part in wanted)))


if __name__ == "__main__":
    run(main)
