"""GPU smoke test: is the text right and how fast is it; six minutes, the most wanted first.

python lab/gpu_smoke.py OUT.json [--model FOLDER] [--shape llama-8b] [--parts=NAME,…] [--seconds S]
python lab/gpu_smoke.py OUT.json --dry-run      on a CPU, with the bundled model

FOLDER is a model packed by ``gpu_model.py``, which is widened to the shape on the GPU; without it
weights are random, for parts that need no text. Parts:

  headline   tokens per second and texts of every way to decode, in turn, prompt by prompt
  static     ``generate`` with a static cache, compiled
  exact      the model unwidened, in float32: greedy, sampled and batched texts
  small      the model unwidened: tokens per second
  batches    tokens per second of all prompts at once
  padded     texts of steps that verify worthless drafts: plain steps of a draft's shape
  costs      seconds of a captured step by context and tokens
  unfused    the same without kernels for norms, MLPs and rotary embeddings
  linear     seconds of the model's matrix products by tokens, and which share their bits
  profile    the longest kernels of steps
  cudnn      ``generate`` and eager steps without cuDNN's attention

All parts share a process. Where one breaks its CUDA context, a new one goes on with the next part.
The file is written after every part, and within ``headline`` after every prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from gpu_model import POSITIONS, build
from gpu_steps import Steps
from token_recycling import TokenRecycling
from token_recycling.bench.compare import plain_generate
from token_recycling.drafting.base import Drafter, Rows
from token_recycling.drafting.draft import DraftTree, chains
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe, synchronize
from widen import SHAPES

PARTS = (
    "headline",
    "static",
    "exact",
    "small",
    "batches",
    "padded",
    "costs",
    "unfused",
    "linear",
    "profile",
    "cudnn",
)
FEW = 3  # prompts of slow ways
WARM_UP = 24  # tokens of the untimed first answer


class Worthless(Drafter[Rows]):
    """Chains of tokens that text has no reason to contain."""

    name = "worthless"

    def __init__(self, nodes: int, vocab: int) -> None:
        """Draft ``nodes`` tokens."""
        self.nodes, self.random = nodes, torch.Generator().manual_seed(2)
        self.vocab = vocab

    def propose(self, rows: Rows, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return chains of random tokens."""
        shape = (len(roots), self.nodes)
        random = torch.randint(self.vocab, shape, generator=self.random)
        return chains(torch.cat([roots[:, None], random], dim=1))

    def observe(self, rows: Rows, draft: Any, candidates: Any, accepted: Any) -> None:
        """Learn nothing."""


class Smoke:
    """A model, the prompts, and one method for each part."""

    def __init__(self, model: Any, prompts: list[list[int]], options: argparse.Namespace) -> None:
        """Prepare."""
        self.device = next(model.parameters()).device
        self.model, self.prompts, self.dry = model, prompts, options.dry_run
        self.tokens = 16 if self.dry else options.tokens
        self.folder: Path = options.model
        self.left_out: list[str] = options.without
        self.end = time.perf_counter() + options.seconds
        self.steps = Steps(model, dry=self.dry)

    @property
    def over(self) -> bool:
        """True when nothing new may begin."""
        return time.perf_counter() > self.end

    def open(self, **options: Any) -> TokenRecycling:
        """Return a recycler that has learnt nothing."""
        return TokenRecycling(self.model, None, **options)

    def recycled(self, **options: Any) -> Callable[[list[int], int], tuple[list[int], Any]]:
        """Return a function that answers with a recycler of its own."""
        recycler = self.open(**options)

        def answer(prompt: Any, tokens: int) -> tuple[list[Any], Any]:
            found = recycler.generate(prompt, max_new_tokens=tokens)
            if isinstance(found, list):
                return [one.token_ids for one in found], recycler.stats
            return found.token_ids, found.stats

        def settle() -> dict[str, Any]:
            """Wait for kernels that are compiled in a thread; say which steps were captured."""
            graph = recycler.session._graph
            if graph is None:
                return {"graph": None}
            graph.pool.wait(30)
            runners = [(key, one.step.drafting.lag) for key, one in graph.pool._steps.items()]
            return {"graph": repr(runners)}  # the steps say what drafts

        answer.settle = settle  # type: ignore[attr-defined]
        return answer

    def stock(self, **options: Any) -> Callable[[list[int], int], tuple[list[int], Any]]:
        """Return a function that answers with Transformers' ``generate``."""
        recycler = self.open(drafter="none", graph=False)

        def answer(prompt: list[int], tokens: int) -> tuple[list[int], Any]:
            return plain_generate(recycler, prompt, {"max_new_tokens": tokens, **options}), None

        return answer

    def in_turn(
        self,
        ways: dict[str, Callable[[], Any]],
        write: Callable[[Any], None],
        few: tuple[str, ...] = (),
        warm_up: tuple[list[int], int] | None = None,
    ) -> Any:
        """Answer every prompt in every way; return seconds, tokens and what went wrong.

        Args:
            ways: make what answers.
            write: keeps the result so far.
            few: slow ways, which answer ``FEW`` prompts only.
            warm_up: the untimed prompt and its new tokens.
        """
        ways = {name: make for name, make in ways.items() if name not in self.left_out}
        found: dict[str, Any] = {name: {"answers": [], "warnings": []} for name in ways}
        ready: dict[str, Any] = {}
        first, tokens = warm_up or (self.prompts[-1], WARM_UP)
        for name, make in ways.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    synchronize(self.device)
                    begun = time.perf_counter()
                    ready[name] = make()
                    ready[name](first, tokens)
                    synchronize(self.device)
                    found[name]["first"] = time.perf_counter() - begun
                    settle = getattr(ready[name], "settle", dict)
                    settle()
                    # The second finds kernels that the first did not wait for.
                    ready[name](first, tokens)
                    found[name] |= settle()
                    found[name]["ready"] = time.perf_counter() - begun
                except Exception:
                    found[name]["failed"] = traceback.format_exc()[-1500:]
                    ready.pop(name, None)
            found[name]["warnings"] = sorted({str(one.message)[:300] for one in caught})
            print(name, {k: v for k, v in found[name].items() if k != "answers"}, flush=True)
            write(found)
        for number, prompt in enumerate(self.prompts[:-1]):
            for name, way in list(ready.items()):
                if self.over:
                    return found
                if number >= FEW and name in few:
                    continue
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        synchronize(self.device)
                        begun = time.perf_counter()
                        new, stats = way(prompt, self.tokens)
                        synchronize(self.device)
                        seconds = time.perf_counter() - begun
                    except Exception:
                        found[name]["failed"] = traceback.format_exc()[-1500:]
                        del ready[name]
                        continue
                one: dict[str, Any] = {"tokens": new, "seconds": seconds}
                if stats is not None:
                    one |= {"steps": stats.steps, "drafted": stats.drafted}
                    one |= {"prefill": stats.prefill_seconds, "phases": stats.seconds}
                found[name]["answers"].append(one)
                found[name]["warnings"] += [str(one.message)[:300] for one in caught]
            write(found)
        return found

    def headline(self, write: Callable[[Any], None]) -> Any:
        """Every way to decode."""
        ways: dict[str, Callable[[], Any]] = {
            "generate": self.stock,
            "graph, no drafts": lambda: self.recycled(drafter="none", graph=True),
            "graph, default": lambda: self.recycled(graph=True),
            "graph, 15 nodes": lambda: self.recycled(nodes=15, graph=True),
            "graph, 31 nodes": lambda: self.recycled(nodes=31, graph=True),
            "graph, 63 nodes": lambda: self.recycled(nodes=63, graph=True),
            "eager, no drafts": lambda: self.recycled(drafter="none", graph=False),
            "eager, default": lambda: self.recycled(graph=False),
        }
        return self.in_turn(ways, write, ("generate", "eager, no drafts", "eager, default"))

    def exact(self, write: Callable[[Any], None]) -> Any:
        """The small model in float32: texts of graphs, sampled ones and batches included."""
        if self.dry:
            return None
        model, questions = build(self.folder, None, "float32", self.device)
        prompts = [one["tokens"] for one in questions[:5]]
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
        found: dict[str, Any] = {}
        for name, options in {
            "graph, 31 nodes": {"nodes": 31, "graph": True},
            "graph, no drafts": {"drafter": "none", "graph": True},
            "eager, default": {"graph": False},
        }.items():
            recycler = TokenRecycling(model, None, **options)
            more = {"max_new_tokens": 64}
            greedy = [recycler.generate(one, **more).token_ids for one in prompts]
            again = [recycler.generate(one, **more).token_ids for one in prompts]
            batch = [one.token_ids for one in recycler.generate(prompts, **more)]
            drawn = [recycler.generate(one, **more, **sampled).token_ids for one in prompts]
            found[name] = {"greedy": greedy, "again": again, "batch": batch, "sampled": drawn}
            found[name]["graph"] = repr(getattr(recycler.session._graph, "_steps", {}).keys())
        stock = TokenRecycling(model, None, drafter="none", graph=False)
        right = [plain_generate(stock, one, {"max_new_tokens": 64}) for one in prompts]
        drawn = [plain_generate(stock, one, {"max_new_tokens": 64, **sampled}) for one in prompts]
        found["generate"] = {"greedy": right, "sampled": drawn}
        for name, texts in found.items():
            for kind in ("greedy", "again", "batch", "sampled"):
                wanted = drawn if kind == "sampled" else right
                if kind in texts:
                    same = sum(a == b for a, b in zip(texts[kind], wanted))
                    texts[f"{kind} as generate"] = f"{same} of {len(wanted)}"
            print(name, {k: v for k, v in texts.items() if isinstance(v, str)}, flush=True)
        return found

    def small(self, write: Callable[[Any], None]) -> Any:
        """The packed model at its own size."""
        if self.dry:
            return None
        wide, self.model = self.model, build(self.folder, None, "bfloat16", self.device)[0]
        try:
            ways: dict[str, Callable[[], Any]] = {
                "generate": self.stock,
                "graph, no drafts": lambda: self.recycled(drafter="none", graph=True),
                "graph, default": lambda: self.recycled(graph=True),
                "graph, 15 nodes": lambda: self.recycled(nodes=15, graph=True),
            }
            return self.in_turn(ways, write, ("generate",))
        finally:
            self.model = wide

    def batches(self, write: Callable[[Any], None]) -> Any:
        """All prompts as one batch: two answers to warm up, then every way in turn, three times."""
        prompts, ready, result = self.prompts[:-1], {}, {}
        for name, options in {
            "graph, no drafts": {"drafter": "none"},
            "graph, default": {},
            "graph, 7 nodes": {"nodes": 7},
            "graph, 15 nodes": {"nodes": 15},
        }.items():
            answer = ready[name] = self.recycled(**options, graph=True)
            for _ in range(2):
                answer(prompts, self.tokens)
                settled = answer.settle()  # type: ignore[attr-defined]
            result[name] = {"answers": [], **settled}
        for _ in range(3):
            for name, answer in ready.items():
                synchronize(self.device)
                begun = time.perf_counter()
                texts, stats = answer(prompts, self.tokens)
                synchronize(self.device)
                measured = {"seconds": time.perf_counter() - begun, "steps": stats.steps}
                measured |= {"prefill": stats.prefill_seconds, "phases": stats.seconds}
                measured |= {"drafted": stats.drafted}
                print(name, measured, flush=True)
                measured["tokens per second"] = sum(map(len, texts)) / measured["seconds"]
                result[name]["answers"].append(measured)
                result[name]["texts"] = texts
            write(result)
        return result

    def padded(self, write: Callable[[Any], None]) -> Any:
        """Steps of 16 tokens with real and with worthless drafts: are the texts the same."""
        vocab = self.model.config.vocab_size
        ways: dict[str, Callable[[], Any]] = {
            "15 nodes": lambda: self.recycled(nodes=15, graph=True),
            "15 worthless": lambda: self.recycled(drafter=Worthless(15, vocab), graph=True),
        }
        return self.in_turn(ways, write)

    def static(self, write: Callable[[Any], None]) -> Any:
        """``generate`` with a static cache, which compiles the forward."""
        longest = max(self.prompts[:-1], key=len)
        ways = {"generate, static": lambda: self.stock(cache_implementation="static")}
        return self.in_turn(ways, write, tuple(ways), (longest, self.tokens))

    def cudnn(self, write: Callable[[Any], None]) -> Any:
        """Is cuDNN's attention what makes eager steps slow."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            ways: dict[str, Callable[[], Any]] = {
                "generate": self.stock,
                "eager, no drafts": lambda: self.recycled(drafter="none", graph=False),
                "eager, 15 nodes": lambda: self.recycled(nodes=15, graph=False),
            }
            return self.in_turn(ways, write)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)


def read(path: Path) -> dict[str, Any]:
    """Return what was measured so far."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def table(found: dict[str, Any]) -> str:
    """Return the headline as lines."""
    lines = []
    for part in ("headline", "static", "small", "padded", "cudnn"):
        ways = found.get(part, {}).get("value") or {}
        texts = {name: [one["tokens"] for one in way["answers"]] for name, way in ways.items()} or {
            "": []
        }
        first = next(iter(texts))
        for name, way in ways.items():
            answers = way["answers"]
            if not answers:
                lines.append(f"{part:9} {name:26} {way.get('failed', 'nothing')[-200:]}")
                continue
            rates = [len(one["tokens"]) / one["seconds"] for one in answers]
            same = sum(a == b for a, b in zip(texts[first], texts[name]))
            steps = sum(one.get("steps", 0) for one in answers)
            made = sum(len(one["tokens"]) - 1 for one in answers)
            decoding = sum(sum(one.get("phases", {}).values()) for one in answers)
            line = f"{part:9} {name:26} {median(rates):7.1f} tokens/s, first {way['first']:5.1f} s"
            line += f", text as {first}: {same} of {len(answers)}"
            if steps:
                line += f", MAT {made / steps:.2f}, {1e3 * decoding / steps:.2f} ms a step"
                line += f", {sum(one['drafted'] for one in answers) / steps:.1f} drafted"
            lines.append(line)
            lines += [f"          ! {one}" for one in sorted(set(way["warnings"]))]
    return "\n".join(lines)


def child(options: argparse.Namespace) -> None:
    """Measure the parts in this process."""
    dry = options.dry_run
    device = torch.device("cpu" if dry else "cuda")
    begun = time.perf_counter()
    if dry:
        bundled = TokenRecycling.from_pretrained(device="cpu")
        model, prompts = bundled.model, [list(range(5, 25)), list(range(9, 30)), [7, 8, 9]]
    elif options.model is None:
        config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=POSITIONS)
        with device:
            kind = getattr(torch, options.dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
        prompts = [list(range(100, 150))]
    else:
        model, questions = build(options.model, options.shape, options.dtype, device)
        # A long prompt last: it warms up.
        prompts = [one["tokens"] for one in questions[: options.prompts + 1]]
    ready = time.perf_counter() - begun
    smoke = Smoke(model, prompts, options)
    found = read(options.out)
    found.setdefault("machine", describe(device))
    found.setdefault("bandwidth", smoke.steps.speed)
    found.setdefault("model seconds", []).append(ready)
    if device.type == "cuda":
        found["cudnn version"] = torch.backends.cudnn.version()
    print(f"model ready after {ready:.1f} s, {smoke.steps.speed / 1e12:.2f} TB/s", flush=True)
    for part in options.parts:
        if smoke.over:
            break
        begun = time.perf_counter()

        def write(value: Any, part: str = part, begun: float = begun, **more: Any) -> None:
            found[part] = {"seconds": time.perf_counter() - begun, "value": value, **more}
            if device.type == "cuda":
                found[part]["memory"] = torch.cuda.max_memory_allocated()
            write_text(options.out, json.dumps(found) + "\n")

        found[part] = {"value": None, "begun": True}
        write_text(options.out, json.dumps(found) + "\n")
        try:
            measured = getattr(smoke.steps, part, None)
            write(measured() if measured else getattr(smoke, part)(write))
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
            write((found.get(part) or {}).get("value"), failed=traceback.format_exc()[-2500:])
        print(f"== {part}: {found[part]['seconds']:.1f} s", flush=True)
        synchronize(device)  # raises where a kernel has broken the CUDA context


def main() -> int:
    """Measure what the command line asks for; return an exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a packed model")
    parser.add_argument("--shape", help="to widen it to; omitted: as it is")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=240.0, help="start nothing new after")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--without", action="append", default=[], help="a way to leave out")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    end = time.perf_counter() + options.seconds
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--parts")]
    missing = [part for part in options.parts if "value" not in read(options.out).get(part, {})]
    while missing and (left := end - time.perf_counter()) > 0:
        command = [sys.executable, __file__, *given, "--child"]
        command += [f"--parts={','.join(missing)}", f"--seconds={left:.0f}"]
        try:
            subprocess.run(command, timeout=left + 15)
        except subprocess.TimeoutExpired:
            print("the time is over", flush=True)
        begun = [part for part in missing if part in read(options.out)]
        if not begun:
            break
        missing = [part for part in missing if part not in begun]
    found = read(options.out)
    print(table(found))
    return int(
        bool(missing) or any("failed" in part for part in found.values() if isinstance(part, dict))
    )


if __name__ == "__main__":
    sys.exit(main())
