"""Serves loads with vLLM or SGLang; ``bench_serving.py`` and ``gpu_engine.py`` call it.

python lab/engines.py ENGINE LOAD.json PASSES.json     in a process of its own
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Load:
    """One life of an engine: how it is started, and the requests it serves.

    Attributes:
        model: folder or Hub name.
        mode: one of the engine's ``modes``.
        arguments: of the engine, beside those of the mode.
        warm_up: prompts as token ids, served at once before the first pass.
        prompts: of the passes, as token ids; every pass gets prompts of its own, so that what was
            learnt before does not help it.
        new_tokens: of every request.
        temperature: 0: greedy.
        concurrency: numbers of requests served at once, one after the other.
        chain: most drafted tokens of a chain.
        tree: most drafted nodes of a tree.
        options: of the plug-in.
        stop: tokens that end a request; none: the end-of-sequence token does not end it either.
    """

    model: str
    mode: str
    arguments: dict[str, Any]
    warm_up: list[list[int]]
    prompts: list[list[int]]
    new_tokens: int
    temperature: float
    concurrency: list[int]
    chain: int
    tree: int
    options: dict[str, Any] = field(default_factory=dict)
    stop: list[int] = field(default_factory=list)

    def of(self, turn: int) -> list[list[int]]:
        """Return the prompts of the pass with ``concurrency[turn]`` requests at once."""
        return self.prompts[turn :: len(self.concurrency)]


@dataclass
class Pass:
    """All prompts served once, a number of requests at a time.

    Attributes:
        concurrency: requests served at once.
        seconds: from the first request to the last token.
        texts: token ids of the answers.
        drafts: number of drafts that were verified.
        accepted: number of drafted tokens that were accepted.
    """

    concurrency: int
    seconds: float
    texts: list[list[int]]
    drafts: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return sum(map(len, self.texts)) / self.seconds


class Vllm:
    """vLLM."""

    modes = ("plain", "ngram", "ngram_gpu", "chain", "tree")

    def __init__(self, load: Load) -> None:
        """Start it."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**self.arguments(load)))

    @staticmethod
    def arguments(load: Load) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        ours = {"method": "token_recycling", "mode": load.mode, **load.options}
        ngram = {"num_speculative_tokens": load.chain, "prompt_lookup_max": 4}
        speculative: dict[str, dict[str, Any]] = {
            "ngram": {"method": "ngram", **ngram},
            # On the device, in Model Runner V2
            "ngram_gpu": {"method": "ngram_gpu", "prompt_lookup_min": 2, **ngram},
            "chain": {**ours, "num_speculative_tokens": load.chain},
            "tree": {**ours, "num_speculative_tokens": load.tree},
        }
        found = {
            "model": load.model,
            "max_num_seqs": max(load.concurrency),
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            **load.arguments,
        }
        if load.mode != "plain":
            found["speculative_config"] = speculative[load.mode]
        return found

    def _counted(self) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted tokens so far."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        figures = {metric.name: metric for metric in get_metrics_snapshot()}
        drafts, accepted = (getattr(figures.get(name), "value", 0) for name in names)
        return drafts, accepted

    def serve(self, load: Load, prompts: list[list[int]], concurrency: int) -> Pass:
        """Serve ``prompts`` with ``concurrency`` requests at once."""
        from vllm import SamplingParams

        texts: dict[int, list[int]] = {}
        waiting, running = list(range(len(prompts)))[::-1], 0
        before, begun = self._counted(), perf_counter()
        while len(texts) < len(prompts):
            while waiting and running < concurrency:
                i = waiting.pop()
                sampling = SamplingParams(
                    temperature=load.temperature,
                    seed=i if load.temperature else None,
                    max_tokens=load.new_tokens,
                    ignore_eos=not load.stop,
                    stop_token_ids=load.stop or None,
                    detokenize=False,
                )
                self.engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, sampling)
                running += 1
            for output in self.engine.step():
                if output.finished:
                    texts[int(output.request_id)] = list(output.outputs[0].token_ids)
                    running -= 1
        seconds = perf_counter() - begun
        drafts, accepted = (now - then for then, now in zip(before, self._counted()))
        return Pass(concurrency, seconds, [texts[i] for i in sorted(texts)], drafts, accepted)


class Sglang:
    """SGLang."""

    modes = ("plain", "ngram", "tree")

    def __init__(self, load: Load) -> None:
        """Start it."""
        for name, value in load.options.items():
            os.environ["TOKEN_RECYCLING_" + name.upper()] = str(value)
        import sglang

        algorithm, drafted = {
            "plain": (None, None),
            "ngram": ("NGRAM", load.chain + 1),
            "tree": ("TOKEN_RECYCLING", load.tree + 1),
        }[load.mode]
        given = {
            "model_path": load.model,
            "skip_tokenizer_init": True,
            "max_running_requests": max(load.concurrency),
            "log_level": "warning",
            "speculative_algorithm": algorithm,
            "speculative_num_draft_tokens": drafted,
            **load.arguments,
        }
        self.engine = sglang.Engine(**given)

    def serve(self, load: Load, prompts: list[list[int]], concurrency: int) -> Pass:
        """Serve ``prompts`` with ``concurrency`` requests at once."""
        sampling = {
            "temperature": load.temperature,
            "max_new_tokens": load.new_tokens,
            "ignore_eos": not load.stop,
            "stop_token_ids": load.stop or None,
        }

        async def answers() -> list[Any]:
            turn = asyncio.Semaphore(concurrency)

            async def answer(prompt: list[int]) -> Any:
                async with turn:
                    return await self.engine.async_generate(
                        input_ids=prompt, sampling_params=sampling
                    )

            return await asyncio.gather(*map(answer, prompts))

        begun = perf_counter()
        found = self.engine.loop.run_until_complete(answers())
        seconds = perf_counter() - begun
        texts = [one["output_ids"] for one in found]
        verified = [one["meta_info"].get("spec_verify_ct", 0) for one in found]
        accepted = sum(len(text) - 1 - n for text, n in zip(texts, verified) if n)
        return Pass(concurrency, seconds, texts, sum(verified), accepted)


ENGINES: dict[str, Any] = {"vllm": Vllm, "sglang": Sglang}


def run(name: str, loads: list[Load], ready: Callable[[], object] = lambda: None) -> Iterator[Pass]:
    """Start an engine for the first load, call ``ready``, and serve the passes of all loads."""
    engine, first = ENGINES[name](loads[0]), loads[0]
    engine.serve(first, first.warm_up, len(first.warm_up))
    ready()
    for load in loads:
        for turn, concurrency in enumerate(load.concurrency):
            yield engine.serve(load, load.of(turn), concurrency)
    if name == "sglang":
        engine.engine.shutdown()


if __name__ == "__main__":
    _, engine, asked, out = sys.argv
    given = Load(**json.loads(Path(asked).read_text("utf-8")))
    passes = [asdict(one) for one in run(engine, [given])]
    Path(out).write_text(json.dumps(passes), encoding="utf-8")
