"""What gpu_suite.py measures: a model, and one function for each part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import gpu_kernels
from gpu_launches import Launches
from token_recycling import TokenRecycling
from token_recycling.bench.compare import plain_generate
from token_recycling.bench.prompts import DEMO
from token_recycling.decoding.sequence import Sequence
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import chains
from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.graph import decoder
from token_recycling.graph import runner as graphs
from token_recycling.graph.runner import GraphRunner
from token_recycling.graph.step import GraphStep
from token_recycling.util.machine import synchronize
from token_recycling.util.modes import ordinary_tensors
from token_recycling.warm.fill import fill
from widen import SHAPES

NODES = (1, 4, 16, 32, 48, 64)
DRAFTED = (16, 32, 64)  # nodes of drafts on the host and on the device
PROPOSE = "token_recycling.drafting.kernels.device.propose."
# Other ways to run the kernel that grows trees
OTHER_WAYS: dict[str, tuple[str, Any]] = {
    "4 warps": (PROPOSE + "PROPOSE_WARPS", 4),
    "4 nodes a round": (PROPOSE + "nodes_per_round", lambda n, width: 4),
    "16 nodes a round": (PROPOSE + "nodes_per_round", lambda n, width: 16),
}
REPEATS = 30
TIES = 8  # roundings of the largest logit within which two tokens are all but tied
RANDOM = "random-"  # before the name of a shape: random weights instead of the bundled model's
LONGEST = 65536  # positions of a model with random weights
IDLE = [False]  # a row that has ended costs what others do, and its context does not grow


class Deadline:
    """A time after which a part starts nothing new."""

    def __init__(self, seconds: float) -> None:
        """Start now."""
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self._end - time.perf_counter())

    @property
    def over(self) -> bool:
        """True when the time has passed."""
        return not self.left


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
    """Bytes per second read by the faster of two ways to read ``size`` bytes once."""
    data = torch.ones(size // 4, device=device)
    out = torch.empty_like(data)
    with torch.no_grad():
        ways = {size: lambda: data.sum(), 2 * size: lambda: out.copy_(data)}
        for way in ways.values():
            way()
        return max(count / seconds_of(way, device, 10) for count, way in ways.items())


def replaying(graph: Any, kept: Any) -> Callable[[], None]:
    """Return a function that replays a CUDA graph, which reads and writes tensors of ``kept``."""

    def replay(kept: Any = kept) -> None:
        graph.replay()

    return replay


@contextmanager
def interpreted(device: torch.device) -> Iterator[None]:
    """Run the device's kernels in Triton's interpreter if ``device`` is a CPU."""
    if device.type != "cpu":
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def load(source: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a checkpoint, or of random weights ("random-" and a shape)."""
    if not Path(source).is_dir():
        config = LlamaConfig(**SHAPES[source.removeprefix(RANDOM)], max_position_embeddings=LONGEST)
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        return model.eval(), None
    # Warm rows of this model cost seconds, of which no part needs any.
    recycler = TokenRecycling.from_pretrained(source, device=device, dtype=dtype, warm=False)
    return recycler.model, recycler.tokenizer


class Bench:
    """One model, and what is measured of it.

    Attributes:
        recycler: the model, without warm rows.
        prompts: token ids.
        contexts: tokens in the cache, for parts that measure several.
        new_tokens: of every answer.
        rounds: in which ways to decode are measured in turn.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        speed: float,
        contexts: tuple[int, ...],
        kernel_contexts: tuple[int, ...],
        drafted: tuple[int, ...],
        prompts: int,
        new_tokens: int,
        rounds: int,
        repeats: int,
    ) -> None:
        """Prepare; ``speed`` is the memory's bandwidth in bytes per second."""
        self.device, self.speed = device, speed
        self.kernel_contexts, self.drafted, self.repeats = kernel_contexts, drafted, repeats
        self.new_tokens, self.rounds = new_tokens, rounds
        self.recycler = TokenRecycling(model, tokenizer, warm=False)
        self.target = self.recycler.target
        limit = self.target.max_positions
        self.contexts = tuple(c for c in contexts if limit is None or c + max(NODES) < limit)
        config, vocab = self.target.config, self.target.vocab_size
        generator = torch.Generator().manual_seed(0)
        most = max(contexts) + 1
        self.tokens = torch.randint(vocab, (most,), generator=generator).tolist()
        weights = sum(w.numel() * w.element_size() for w in model.parameters())
        embedding = model.get_input_embeddings().weight
        if not config.tie_word_embeddings:
            weights -= embedding.numel() * embedding.element_size()
        self.weight_bytes = weights
        heads, size = config.num_key_value_heads, config.head_dim
        self.kv_bytes = 2 * config.num_hidden_layers * heads * size * embedding.element_size()
        if tokenizer is None:
            self.prompts = [self.tokens[:20]]
        else:
            asked = [as_conversation(tokenizer, [p], False) for p in DEMO[:prompts]]
            self.prompts = [encode(tokenizer, one) for one in asked]
        self._full: AdjacencyMatrix | None = None

    # Parts

    def launches(self, deadline: Deadline) -> dict[str, Any]:
        """Operations of a step outside the model's forward."""
        found: dict[str, Any] = {}
        with interpreted(self.device):
            if not has_device_kernels(self.device):
                return {"not counted": "Triton is not installed"}
            for batch in (1, 4):
                self.target.prefill([self.tokens[:20]] * batch)
                step = GraphStep(self.target, self._drafter(17), batch, 256, 17, kernels=True)
                with ordinary_tensors():
                    step.begin([Sequence(self.tokens[:21]) for _ in range(batch)], [])
                names = Launches(self.recycler.model).during(step)
                if self.device.type == "cpu":  # found there without an operation
                    names.append("argmax")
                found[str(batch)] = names
        return found

    def identity(self, deadline: Deadline) -> dict[str, Any]:
        """Compare the text of graphs with the eager loop's, with ``generate``'s and with itself.

        Where two texts part, the gap of the two tokens' logits is noted in roundings (machine
        epsilon times the largest logit).
        """
        ways = {
            "graph": self._way(graph=True, nodes=31),
            "eager": self._way(graph=False, nodes=31),
            "generate": self._generate(),
        }
        found: dict[str, Any] = {"prompts": 0, "eager": 0, "generate": 0, "again": 0, "parted": []}
        for prompt in self.prompts:
            if deadline.over:
                return {**found, "stopped": True}
            answers = {name: way(prompt) for name, way in ways.items()}
            found["prompts"] += 1
            # The matrix has learnt this prompt: other drafts, the same text.
            found["again"] += ways["graph"](prompt) == answers["graph"]
            for other in ("eager", "generate"):
                found[other] += answers["graph"] == answers[other]
                if answers["graph"] != answers[other]:
                    gap = self._gap(prompt, answers["graph"], answers[other])
                    found["parted"].append({"from": other, **gap})
        found["near ties"] = sum(one["roundings"] <= TIES for one in found["parted"])
        return found

    def syncs(self, deadline: Deadline) -> dict[str, Any]:
        """How often the host waits for the device, per captured step of an answer."""
        if self.device.type != "cuda":
            return {"not counted": "there is no CUDA device"}
        recycler = TokenRecycling(
            self.recycler.model, self.recycler.tokenizer, nodes=16, warm=False
        )
        counts: list[dict[str, float]] = []
        steps = []
        lengths = (self.new_tokens // 4, self.new_tokens // 4, self.new_tokens)
        for new_tokens in lengths:  # the first answer compiles
            recycler.forget_context()
            with torch.profiler.profile() as profile:
                answer = recycler.generate(self.prompts[0], max_new_tokens=new_tokens)
            steps.append(answer.stats.steps)
            waits = [e for e in profile.key_averages() if "Synchronize" in e.key]
            counts.append({event.key: event.count for event in waits})
        more = max(steps[2] - steps[1], 1)
        names = counts[2].keys()
        per_step = {name: (counts[2][name] - counts[1].get(name, 0)) / more for name in names}
        return {"per step": per_step, "sum": sum(per_step.values()), "steps": steps}

    def costs(self, deadline: Deadline) -> dict[str, Any]:
        """Seconds of a captured, not compiled step by context and nodes."""
        rows: list[dict[str, Any]] = []
        for context in self.contexts:
            plain = 0.0
            for nodes in NODES:
                if deadline.over:
                    break
                runner = self._runner(self._drafter(nodes), nodes, context)
                seconds = self._step_seconds(runner)
                plain = plain or seconds
                floor = (self.weight_bytes + context * self.kv_bytes) / self.speed
                row = {"context": context, "nodes": nodes, "seconds": seconds, "floor": floor}
                rows.append({**row, "c": seconds / plain, "of bandwidth": floor / seconds})
        return {"weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes, "rows": rows}

    def compiled(self, deadline: Deadline) -> dict[str, Any]:
        """Captured steps with code by Inductor and without, and the time to compile."""
        rows = []
        for nodes in (1, 16, 64):
            for name, compiled in (("captured", False), ("compiled", True)):
                if deadline.over:
                    break
                begin = time.perf_counter()
                runner = self._runner(self._drafter(nodes), nodes, self._middle, compiled=compiled)
                ready = time.perf_counter() - begin
                seconds = self._step_seconds(runner)
                rows.append({"nodes": nodes, "by": name, "seconds": seconds, "ready": ready})
        return {"context": self._middle, "rows": rows}

    def drafting(self, deadline: Deadline) -> dict[str, Any]:
        """Steps that draft on the device against steps that draft on the host; both captured.

        Those on the device once more with other ways to run the kernel that grows trees.
        """
        rows = []
        context = min(self.contexts)
        for nodes in self.drafted:
            with interpreted(self.device), ordinary_tensors(), torch.no_grad():
                for where in ("host", "device"):
                    kernels = where == "device"
                    if deadline.over or (kernels and not has_device_kernels(self.device)):
                        continue
                    runner = self._runner(self._drafter(nodes), nodes, context, kernels=kernels)
                    rows.append({"nodes": nodes, "by": where, "seconds": self._active(runner)})
                for way, (name, value) in OTHER_WAYS.items():
                    if deadline.over or not has_device_kernels(self.device):
                        break
                    with patch(name, value):
                        runner = self._runner(self._drafter(nodes), nodes, context)
                        by = f"device, {way}"
                        rows.append({"nodes": nodes, "by": by, "seconds": self._active(runner)})
        return {"context": context, "rows": rows}

    def phases(self, deadline: Deadline) -> dict[str, Any]:
        """Time of the whole captured step, of the model alone in it, and the longest kernels."""
        found: dict[str, Any] = {"context": self._middle}
        for nodes in (16, 32, 64):
            if deadline.over:
                break
            runner = self._runner(self._drafter(nodes), nodes, self._middle)
            whole = self._step_seconds(runner)
            model = self._seconds(self._model_only(nodes, self._middle))
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    runner.launch(IDLE)()
            key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            events = sorted(profile.key_averages(), key=lambda event: -getattr(event, key))
            longest = {event.key[:100]: getattr(event, key) / 5 for event in events[:20]}
            found[str(nodes)] = {"step": whole, "model": model, "longest, us a step": longest}
        return found

    def kernels(self, deadline: Deadline) -> dict[str, Any]:
        """Ways to attend and to take the k best logits, with this model's heads and vocabulary."""
        config, dtype = self.target.config, self.target.dtype
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        seconds, contexts = self._seconds, self.kernel_contexts
        return {
            "attention": gpu_kernels.attention(heads, dtype, self.device, seconds, contexts),
            "top-k": gpu_kernels.top_k(self.target.vocab_size, dtype, self.device, seconds),
        }

    def warm(self, deadline: Deadline) -> dict[str, Any]:
        """Fill the rows of all tokens by the model."""
        matrix = AdjacencyMatrix(self.target.vocab_size, self.recycler.matrix.k)
        with ordinary_tensors():
            filled = fill(self.target, matrix, seconds=deadline.left)
        if filled.failure:
            raise RuntimeError(filled.failure)
        return asdict(filled)

    def speeds(self, deadline: Deadline) -> dict[str, Any]:
        """Tokens per second of whole answers, every way in turn, prompt by prompt.

        "default" is what a new user gets, warm rows and automatic size included.
        """
        ways = {
            "plain graph": self._way(graph=True, drafter="none"),
            "generate": self._generate(),
            "generate, prompt lookup": self._generate(prompt_lookup_num_tokens=10),
            "generate, static compiled cache": self._generate(cache_implementation="static"),
            "default": self._way(graph=True, warm=None),
            "default, eager": self._way(graph=False, warm=None),
            **{f"{n} nodes": self._way(graph=True, nodes=n - 1) for n in (16, 32, 64)},
        }
        taken: dict[str, list[list[float]]] = {name: [] for name in ways}
        failed: dict[str, str] = {}
        for turn in range(self.rounds + 1):
            # The first round compiles and warms up.
            for prompt in self.prompts if turn else self.prompts[:1]:
                for name, way in ways.items():
                    if name in failed or deadline.over:
                        continue
                    try:
                        synchronize(self.device)
                        begin = time.perf_counter()
                        tokens = way(prompt)
                        synchronize(self.device)
                    except Exception as error:
                        failed[name] = str(error)[:300]
                        continue
                    if turn:
                        taken[name].append([len(tokens), time.perf_counter() - begin])
        return {"taken": taken, "failed ways": failed, "stopped": deadline.over}

    # Pieces of them

    @property
    def _middle(self) -> int:
        """The context of parts that measure only one: 2,048 tokens where the model allows it."""
        return max(c for c in self.contexts if c <= max(2048, self.contexts[0]))

    def _drafter(self, nodes: int) -> AnyDrafter:
        """A drafter whose drafts have ``nodes`` nodes with the root, from random rows."""
        if nodes == 1:
            return NoDrafter()
        if self._full is None:
            vocab, generator = self.target.vocab_size, torch.Generator().manual_seed(1)
            self._full = AdjacencyMatrix(vocab, self.recycler.matrix.k)
            shape = (vocab, self._full.k)
            self._full.update(torch.arange(vocab), torch.randint(vocab, shape, generator=generator))
        return AdaptiveDrafter(self._full.clone(), nodes - 1)

    def _runner(
        self,
        drafter: AnyDrafter,
        nodes: int,
        context: int,
        *,
        compiled: bool = False,
        kernels: bool | None = None,
    ) -> GraphRunner:
        """Capture a step that stands behind ``context`` random tokens."""
        kernels = has_device_kernels(self.device) if kernels is None else kernels
        torch._dynamo.reset()  # variants of the step are counted
        self.target.prefill([self.tokens[:context]])
        slots = decoder.slots_for(context, nodes)
        step = GraphStep(self.target, drafter, 1, slots, nodes, kernels=kernels)
        runner = GraphRunner(step, compiled=compiled)
        with ordinary_tensors():
            runner.step.begin([Sequence(self.tokens[: context + 1])], [])
        for _ in range(3):
            runner.launch(IDLE)()
        return runner

    def _seconds(self, run: Callable[[], Any]) -> float:
        return seconds_of(run, self.device, self.repeats)

    def _step_seconds(self, runner: GraphRunner) -> float:
        return self._seconds(partial(runner.launch, IDLE))

    def _active(self, runner: GraphRunner) -> float:
        """Median seconds of a step of a row that goes on, by the host's clock."""
        found = []
        for _ in range(self.repeats):
            runner.step.begin([Sequence(self.tokens[: min(self.contexts) + 1])], [])
            synchronize(self.device)
            begin = time.perf_counter()
            runner.launch([True])()
            found.append(time.perf_counter() - begin)
        return median(found)

    def _model_only(self, nodes: int, context: int) -> Callable[[], Any]:
        """The forward of a chain of ``nodes`` as a graph of its own."""
        self.target.prefill([self.tokens[:context]])
        slots = decoder.slots_for(context, nodes)
        kernels = has_device_kernels(self.device)
        step = GraphStep(self.target, NoDrafter(), 1, slots, 1, kernels=kernels)
        step.cache.load(self.target.cache)
        tokens = torch.tensor([self.tokens[:nodes]], device=self.device)
        draft = chains(tokens)
        forward = torch.compile(lambda: step._verify(draft), fullgraph=True, backend=graphs.BACKEND)
        with torch.no_grad():
            for _ in range(3):
                forward()
            if self.device.type != "cuda":
                return torch.no_grad()(forward)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
        return replaying(graph, (step, draft))

    def _way(self, **options: Any) -> Callable[[list[int]], list[int]]:
        """Answer with a recycler of its own."""
        options = {"warm": False, **options}
        recycler = TokenRecycling(self.recycler.model, self.recycler.tokenizer, **options)

        def answer(prompt: list[int]) -> list[int]:
            recycler.forget_context()
            return recycler.generate(prompt, max_new_tokens=self.new_tokens).token_ids

        return answer

    def _generate(self, **options: Any) -> Callable[[list[int]], list[int]]:
        """Answer with Transformers' ``generate``."""
        options = {"max_new_tokens": self.new_tokens, **options}
        return lambda prompt: plain_generate(self.recycler, prompt, options)

    def _gap(self, prompt: list[int], a: list[int], b: list[int]) -> dict[str, Any]:
        """Return where two texts part, and how far their logits are from each other there."""
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is None:
            return {"at": min(len(a), len(b)), "roundings": float("inf")}
        logits = self.target.prefill([prompt + a[:at]])[0].float()
        rounding = torch.finfo(self.target.dtype).eps * logits.abs().max()
        return {"at": at, "roundings": float((logits[a[at]] - logits[b[at]]).abs() / rounding)}


PARTS: dict[str, Callable[[Bench, Deadline], dict[str, Any]]] = {
    "launches": Bench.launches,
    "identity": Bench.identity,
    "syncs": Bench.syncs,
    "costs": Bench.costs,
    "compiled": Bench.compiled,
    "drafting": Bench.drafting,
    "phases": Bench.phases,
    "kernels": Bench.kernels,
    "warm": Bench.warm,
    "speeds": Bench.speeds,
}
