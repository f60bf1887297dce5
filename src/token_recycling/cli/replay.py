"""`token-recycling replay`: compare drafters on recorded answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.bench.replay import Figures
    from token_recycling.bench.suites import Question
    from token_recycling.bench.variants import Variant
    from token_recycling.draft_size.base import DraftSize
    from token_recycling.draft_size.costs import CostCurve
    from token_recycling.drafters import AnyDrafter
    from token_recycling.metrics import Step
    from token_recycling.model.target import Target


def replay(
    suite: Annotated[
        list[str],
        typer.Option(
            "--suite",
            help="Questions: builtin, gsm8k=PATH …, or a JSONL file, as in bench. Repeatable.",
        ),
    ],
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="Answer file in Spec-Bench's format; default: the suite's."),
    ] = None,
    model: o.Model = None,
    decoders: Annotated[
        str | None,
        typer.Option(
            "--decoders",
            help="auto, DRAFTER or DRAFTER@TREE, separated by commas. Default: "
            "prompt-lookup,paper,auto; with --draft-only: prompt-lookup.",
        ),
    ] = None,
    per_kind: Annotated[
        int | None, typer.Option("--per-kind", help="Maximum number of questions per kind.")
    ] = None,
    max_tokens: o.MaxTokens = defaults.MAX_NEW_TOKENS,
    draft_only: Annotated[
        bool, typer.Option("--draft-only", help="Load no model; only for drafters that copy text.")
    ] = False,
    cold: o.Cold = False,
    raw: o.Raw = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    warm: o.Warm = None,
    threads: o.Threads = None,
    as_json: o.Json = False,
) -> None:
    """Compare drafters on the same recorded answers.

    The model reads the answers (teacher forcing) and supplies the candidates; what it would have
    answered itself has no effect. The expected speedup uses the step costs measured by `tune`.
    """
    from token_recycling.bench import replay as replaying
    from token_recycling.bench import suites
    from token_recycling.bench.variants import parse

    if max_tokens < 2:
        raise TokenRecyclingError("-n must be 2 or more")
    if decoders is None:
        decoders = "prompt-lookup" if draft_only else "prompt-lookup,paper,auto"
    variants = [parse(name.strip()) for name in decoders.split(",") if name.strip()]
    if not variants:
        raise TokenRecyclingError(f"--decoders is {decoders!r}; name at least one decoder")
    for variant in variants:
        if variant.drafter is None:
            raise TokenRecyclingError(f"{variant.name} has no drafter to replay; name a drafter")
    questions = suites.load_all(suite, per_kind)
    asked = len(questions)
    if answers is not None:
        questions = replaying.read_answers(answers, questions)
    questions = [question for question in questions if question.answers]
    if not questions:
        raise TokenRecyclingError(
            "these questions have no recorded answers; give them with --answers FILE"
        )
    if missing := asked - len(questions):
        show.note(f"{missing} of {asked} questions have no recorded answer; skipped")
    loading = o.Loading(model, device, dtype, threads=threads, warm=warm)
    make = _WithoutModel(model) if draft_only else _WithModel(loading)
    done, total = 0, len(questions) * len(variants)
    found: dict[str, dict[str, Figures]] = {}
    kinds = list(dict.fromkeys(["all", *(question.kind for question in questions)]))
    left_out = 0
    with progress.progress_shown("answers") as on_progress:
        for variant in variants:
            target, drafter, size, curve = make.open(variant)
            runs: list[tuple[str, int, list[Step]]] = []
            for question in questions:
                for prompt, answer in _texts(make, question, raw, max_tokens):
                    room = target.max_context
                    if room is not None and len(prompt) + len(answer) > room:
                        left_out += 1
                        continue
                    if cold and drafter.matrix is not None:
                        drafter.matrix.reset()
                    steps = replaying.replay(target, drafter, size, prompt, answer)
                    runs.append((question.kind, len(prompt), steps))
                done += 1
                on_progress(done, total)
            found[variant.name] = {
                kind: replaying.figures(
                    [run for k, _, run in runs if kind in ("all", k)],
                    [context for k, context, _ in runs if kind in ("all", k)],
                    curve,
                )
                for kind in kinds
                if any(kind in ("all", k) and run for k, _, run in runs)
            }
    if left_out:
        show.note(f"{left_out // len(variants)} answers do not fit into the context; skipped")
    if not any(found.values()):
        raise TokenRecyclingError("no answer fits into the context and has at least two tokens")
    _print(found, kinds, as_json)


class _WithModel:
    """Replay with teacher forcing; all drafters share one model."""

    def __init__(self, loading: o.Loading) -> None:
        self.first = loading.open()
        self.tokenizer = self.first.tokenizer

    def open(self, variant: Variant) -> tuple[Target, AnyDrafter, DraftSize, CostCurve | None]:
        from token_recycling.bench.decoders import Decoder
        from token_recycling.draft_size.costs import find

        curve = find(self.first.model, self.first.target.device)
        recycler = Decoder(variant, self.first, curve, 1).recycler
        return recycler.target, recycler.drafter, recycler.draft_size, curve


class _WithoutModel:
    """Replay with the tokenizer alone."""

    def __init__(self, model: str | None) -> None:
        from token_recycling.checkpoint.load import load_tokenizer

        self.tokenizer = load_tokenizer(model)

    def open(self, variant: Variant) -> tuple[Target, AnyDrafter, DraftSize, CostCurve | None]:
        from token_recycling.bench.replay import NoModel
        from token_recycling.draft_size.base import FixedSize
        from token_recycling.drafters import make_drafter
        from token_recycling.matrix import AdjacencyMatrix
        from token_recycling.tree import TreeTemplate

        target = NoModel(len(self.tokenizer))
        assert variant.drafter is not None
        template = TreeTemplate.chain(1)  # unused by drafters that copy text
        drafter = make_drafter(variant.drafter, AdjacencyMatrix(target.vocab_size, 1), template)
        return target, drafter, FixedSize(), None


def _texts(
    make: Any, question: Question, raw: bool, limit: int
) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer tokens per turn with a recorded answer of two tokens or more."""
    from token_recycling.bench.runner import conversation

    found = []
    said: list[str] = []
    for turn, answer in zip(question.turns, question.answers):
        said.append(turn)
        prompt = conversation(make, said, raw)
        tokens = make.tokenizer(answer, add_special_tokens=False).input_ids[:limit]
        said.append(answer)
        if len(tokens) > 1:
            found.append((prompt, tokens))
    return found


def _print(found: dict[str, dict[str, Figures]], kinds: list[str], as_json: bool) -> None:
    if as_json:
        rows = {
            name: {kind: {**asdict(f), "mat": f.mat} for kind, f in by_kind.items()}
            for name, by_kind in found.items()
        }
        print(json.dumps(rows))
        return
    print(f"{'':16}" + "".join(f"{name:>24}" for name in found))
    print(f"{'':16}" + "".join(f"{'MAT   tokens  speedup':>24}" for _ in found))
    for kind in kinds:
        cells = []
        for by_kind in found.values():
            figures = by_kind.get(kind)
            if figures is None:
                cells.append(f"{'–':>24}")
                continue
            speedup = figures.expected_speedup
            gained = "–" if speedup is None else f"{speedup:.2f}x"
            cells.append(f"{figures.mat:9.2f} {figures.nodes:7.1f} {gained:>6}")
        print(f"{kind:16}" + "".join(cells))
    print("tokens: verified per step; speedup: expected from the measured step costs, – if unknown")
