"""Captured steps of a model: their seconds by tokens and context, and where these go."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from skinny_kernels.gpu import attention as gpu_attention
from skinny_kernels.gpu.choice import has_device_kernels
from skinny_kernels.modes import ordinary_tensors
from token_recycling import TokenRecycling
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.pool import slots_for
from token_recycling.graph.step import GraphStep, StepSpec
from token_recycling.util.machine import synchronize

NODES = (1, 64, 16)  # kernels for drafts of another size take 10 s to compile
CONTEXTS = (256, 4096, 16384)
REPEATS = 20
IDLE = [False]


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


class Steps:
    """A model whose steps are captured."""

    def __init__(self, model: Any, *, dry: bool) -> None:
        """Measure the memory; ``dry``: few and small steps."""
        self.model, self.device = model, next(model.parameters()).device
        self.speed = bandwidth(self.device, 2**22 if dry else 2**31)
        self.contexts = (24, 40) if dry else CONTEXTS
        self.nodes = (1, 4) if dry else NODES
        self.repeats = 3 if dry else REPEATS
        self.learnt: AdjacencyMatrix | None = None

    def captured(self, nodes: int, context: int) -> CapturedStep:
        """Capture a step of ``nodes`` tokens behind ``context`` random ones; drafts are random."""
        target = TokenRecycling(self.model, None, drafter="none", graph=False).target
        vocab = target.vocab_size
        if self.learnt is None:
            generator = torch.Generator().manual_seed(1)
            self.learnt = AdjacencyMatrix(vocab, 12)
            ids = torch.randint(vocab, (vocab, self.learnt.k), generator=generator)
            self.learnt.update(torch.arange(vocab), ids)
        drafter: Any = AdaptiveDrafter(self.learnt.clone(), nodes - 1) if nodes > 1 else NoDrafter()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab, (context + 1,), generator=generator).tolist()
        target.prefill([tokens[:context]])
        kernels = has_device_kernels(self.device)
        drafts = "device" if kernels else "host"
        spec = StepSpec(1, slots_for(context, nodes), nodes, kernels=kernels, drafts=drafts)
        step = GraphStep(target, drafter, spec)
        runner = CapturedStep(step)
        with ordinary_tensors():
            step.begin([Sequence(tokens)], [])
        for _ in range(3):
            runner.launch(IDLE)()
        return runner

    def costs(self) -> Any:
        """Captured steps, and what they must at least read; a row that ended costs as others."""
        weights = sum(w.nbytes for w in self.model.parameters())
        embedding = self.model.get_input_embeddings().weight
        config = self.model.config
        if not config.tie_word_embeddings:
            weights -= embedding.nbytes
        heads = config.num_key_value_heads * config.head_dim
        entry = 2 * config.num_hidden_layers * heads * embedding.element_size()
        rows = []
        for context in self.contexts:
            floor = (weights + context * entry) / self.speed
            for nodes in self.nodes:
                runner = self.captured(nodes, context)
                seconds = seconds_of(lambda own=runner: own.launch(IDLE), self.device, self.repeats)
                row = {"context": context, "nodes": nodes, "seconds": seconds, "floor": floor}
                rows.append(row)
                print(row, flush=True)
        return rows

    def linear(self) -> Any:
        """Matrix products alone, from memory, by tokens; rows compared with those of 16 tokens."""
        layers = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        some, rows = layers[:8] + layers[-1:], []
        inputs = {
            size: torch.randn(128, size, generator=torch.Generator().manual_seed(size)).to(
                self.device, layers[0].weight.dtype
            )
            for size in {layer.in_features for layer in layers}
        }
        for tokens in (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128):

            def run(tokens: int = tokens) -> None:
                for layer in layers:
                    layer(inputs[layer.in_features][:tokens])

            with torch.no_grad():
                run()
                replay, repeats = run, 1
                if self.device.type == "cuda":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        run()
                    replay, repeats = graph.replay, 5
                seconds = seconds_of(replay, self.device, repeats)
                same, moved, shared = 0, 0, min(16, tokens)
                for layer in some:
                    given = inputs[layer.in_features]
                    own = layer(given[:tokens])
                    same += torch.equal(layer(given[:16])[:shared], own[:shared])
                    moved += torch.equal(layer(given[:tokens].roll(1, 0)).roll(-1, 0), own)
            row = {"tokens": tokens, "seconds": seconds, "layers compared": len(some)}
            rows.append(row | {"bits of 16 tokens": same, "bits wherever a token stands": moved})
            print(rows[-1], flush=True)
        return rows

    def profile(self) -> Any:
        """The longest kernels of captured steps: microseconds and launches of a step."""
        found: dict[str, Any] = {}
        total = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        times = 5
        for nodes in self.nodes[:2]:
            runner = self.captured(nodes, self.contexts[0])
            with torch.profiler.profile() as profile:
                for _ in range(times):
                    runner.launch(IDLE)()
                synchronize(self.device)
            events = [(getattr(e, total), e.count, e.key[:90]) for e in profile.key_averages()]
            longest = sorted(events, reverse=True)[:30]
            whole = (sum(e[0] for e in events), sum(e[1] for e in events), "all")
            found[f"graph, {nodes}"] = {
                name: [round(taken / times, 1), count / times]
                for taken, count, name in [whole, *longest]
            }
        found["attention kernels"] = {repr(key): own for key, own in gpu_attention._settled.items()}
        return found
