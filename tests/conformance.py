"""Conformance of Transformers' architectures under tree verification, one record each.

``python tests/conformance.py [names]`` prints the records as a Markdown page.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from architectures import ARCHITECTURES, WINDOW, make
from models import random_prompts
from skinny_kernels import linear
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.model.probe import open_target

NODES = 16
NEW = 100  # greedy tokens of a single prompt; longer than every attention window
BATCH_NEW, SAMPLED_NEW, REFUSED_NEW = 40, 40, 30
SEEDS = (3, 4)
SINGLES = random_prompts([20, 7])
BATCH = [*SINGLES, *random_prompts([12, 5], seed=2)]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 0}


@dataclass
class Record:
    """Results for one architecture.

    Attributes:
        name: key in ``ARCHITECTURES``.
        expected: whether ``ARCHITECTURES`` says that it is supported.
        reason: why the probe refuses it; empty if it passes.
        attention: attention implementations that load and pass the probe.
        window: attention window of its layers.
        greedy: the tokens for the two single prompts are those of ``model.generate``.
        distinct: fewest distinct tokens in one of these answers; a constant text proves little.
        accepted: number of drafted tokens accepted in the greedy runs.
        batch: the tokens of a batch are those of ``model.generate`` for the same padded batch or,
            where that differs, for the prompts one by one.
        stock_batch: the padded batch of ``model.generate`` equals its own single runs.
        sampled: the tokens are those of ``model.generate`` with the same seed.
        control: with a wrong mask, some greedy text changes.
        plain: if refused, the plainly decoded text is that of ``model.generate``. ``batch`` then
            compares with the padded batch only.
        error: type and message of an exception, truncated.
        seconds: duration of the examination.
    """

    name: str
    expected: bool
    reason: str = ""
    attention: list[str] = field(default_factory=list)
    window: str = ""
    greedy: bool | None = None
    distinct: int = 0
    accepted: int = 0
    recorded: bool = False
    batch: bool | None = None
    stock_batch: bool | None = None
    sampled: bool | None = None
    control: bool | None = None
    plain: bool | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Descriptions of unexpected results; empty if there are none."""
        supported = not self.reason
        found = [self.error] if self.error else []
        if supported != self.expected:
            found.append("the probe's result differs from the table's")
        if supported:
            checks: tuple[str, ...] = ("greedy", "batch", "sampled", "control")
            if not self.accepted:
                found.append("no drafted token was accepted")
        else:
            checks = ("plain", "batch")
            if not re.search(ARCHITECTURES[self.name].why, self.reason):
                found.append("the refusal reason differs from the table's")
        return found + [f"{check} failed" for check in checks if not getattr(self, check)]


def examine(name: str, **changes: Any) -> Record:
    """Build the architecture's model, with ``changes`` to its options, and run all checks on it."""
    architecture = ARCHITECTURES[name]
    record = Record(name, architecture.supported, window=architecture.window)
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # some models print
            warnings.simplefilter("ignore")
            _examine(record, changes)
    except Exception as error:
        text = " ".join(str(error).split())
        record.error = f"{type(error).__name__}: {text}"[:160]
    record.seconds = time.perf_counter() - begin
    return record


def _examine(record: Record, changes: dict[str, Any]) -> None:
    model = make(record.name, **changes)
    record.reason = _refusal(model)
    if record.reason:
        expected = [stock(model, prompt, REFUSED_NEW) for prompt in SINGLES]
        recycler = TokenRecycling(model, nodes=NODES)
        record.plain = expected == [ours(recycler, prompt, REFUSED_NEW) for prompt in SINGLES]
        batch = recycler.generate(BATCH, max_new_tokens=REFUSED_NEW)
        padded = stock_batch(model, BATCH, REFUSED_NEW)
        record.batch = [answer.token_ids for answer in batch] == padded
        return
    for attention in ("eager", "sdpa"):
        try:
            other = make(record.name, **changes, attn_implementation=attention)
        except ValueError:  # not available for this architecture
            continue
        if not _refusal(other):
            record.attention.append(attention)
    expected = [stock(model, prompt, NEW) for prompt in SINGLES]
    recycler = TokenRecycling(model, nodes=NODES, strict=True)
    answers = [recycler.generate(prompt, max_new_tokens=NEW) for prompt in SINGLES]
    record.greedy = [answer.token_ids for answer in answers] == expected
    record.distinct = min(len(set(tokens)) for tokens in expected)
    record.accepted = sum(answer.stats.accepted for answer in answers)
    recordings = recycler.target.recordings
    record.recorded = recordings is not None and recordings.right is True
    _batch(record, model, recycler, expected)
    record.sampled = all(
        ours(recycler, SINGLES[0], SAMPLED_NEW, seed=seed, **SAMPLING)
        == stock(model, SINGLES[0], SAMPLED_NEW, seed=seed, do_sample=True, **SAMPLING)
        for seed in SEEDS
    )
    break_masks(recycler)
    pairs = zip(SINGLES, expected, strict=True)
    record.control = any(ours(recycler, prompt, NEW) != tokens for prompt, tokens in pairs)


def _batch(record: Record, model: Any, recycler: TokenRecycling, singles: list[list[int]]) -> None:
    found = [a.token_ids for a in recycler.generate(BATCH, max_new_tokens=BATCH_NEW)]
    alone = [tokens[:BATCH_NEW] for tokens in singles]
    try:
        padded = stock_batch(model, BATCH, BATCH_NEW)
    except Exception:  # some architectures cannot run a padded batch
        padded = []
    record.batch = found == padded
    if not record.batch:
        alone += [stock(model, prompt, BATCH_NEW) for prompt in BATCH[len(alone) :]]
        record.batch = found == alone
    record.stock_batch = padded[: len(alone)] == alone


def _refusal(model: Any) -> str:
    """Return why a strict load is refused; empty if it is not."""
    try:
        open_target(model, strict=True)
    except TokenRecyclingError as error:
        return str(error).split("tree attention: ")[-1]
    return ""


def break_masks(recycler: TokenRecycling) -> None:
    """Let every node attend to all nodes before it, for the negative control after the probe."""
    target: Any = recycler.target
    right = target.verify

    def verify(draft: Any) -> torch.Tensor:
        causal = torch.ones_like(draft.ancestors).tril()
        logits: torch.Tensor = right(replace(draft, ancestors=causal))
        return logits

    target.verify = verify


def ours(recycler: TokenRecycling, prompt: list[int], new: int, **options: Any) -> list[int]:
    """Return the recycler's new tokens for one prompt."""
    tokens: list[int] = recycler.generate(prompt, max_new_tokens=new, **options).token_ids
    return tokens


def stock(
    model: Any, prompt: list[int], new: int, *, seed: int | None = None, **options: Any
) -> list[int]:
    """Return the new tokens of ``model.generate`` for one prompt."""
    if seed is not None:
        torch.manual_seed(seed)
    return stock_batch(model, [prompt], new, **options)[0]


def stock_batch(model: Any, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    """Return the new tokens of ``model.generate`` for prompts left-padded with 0."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new} | options
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, **options)
    rows: list[list[int]] = out[:, longest:].tolist()
    return rows


# Why architectures are refused: what the probe says, and what a reader is told.
REASONS = (
    ("cannot branch", "Layers keep a state that cannot branch (linear attention, convolutions, "
     "state spaces, sparse or compressed attention), so that a tree would need a copy per node."),
    ("logits in a tree differ", "Logits in a tree differ from those on the path alone: a token's "
     "result depends on its slot or on its neighbours."),
    ("probe failed", "The model's code does not accept a tree's mask or positions."),
    ("", "Attention depends on the slot in the cache."),
)  # fmt: skip


def page(records: list[Record]) -> str:
    """Return the text of ``docs/models.md``."""
    import transformers

    supported = sum(not record.reason for record in records)
    lengths = [len(prompt) for prompt in BATCH]
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    return f"""# Models

{supported} of {len(records)} architectures of Transformers are supported. The others are detected
when a model is loaded, and decoded as without this package, with one warning that gives the reason.

Generated by `make models` (`tests/conformance.py`) with {versions},
in float32 on a CPU, from tiny models with random weights (`tests/architectures.py`). Attention
windows are {WINDOW} positions long. For every supported architecture {NEW} greedy tokens after
prompts of {lengths[0]} and {lengths[1]} tokens, a batch of prompts of {lengths} tokens, and
{SAMPLED_NEW} tokens sampled at temperature {SAMPLING["temperature"]} with {len(SEEDS)} seeds
are those of `model.generate`. As a negative control, a wrong tree mask changes some of these
texts. For the others, plain text and the batch are compared.

{markdown(records)}

On a CPU, [steps are recorded](cpu.md#how-they-work) of: {_recorded(records)}.
"""


def markdown(records: list[Record]) -> str:
    """Render records as two tables: supported and refused; then what is not as expected."""
    groups: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {text: [] for _, text in REASONS}
    for record in records:
        if record.reason:
            text = next(text for said, text in REASONS if said in record.reason)
            reasons[text].append(record.name)
        else:
            window = f"{record.window}; {' and '.join(record.attention)}"
            groups.setdefault(window, []).append(record.name)
    lines = ["| supported: attention window; implementations | |", "|---|---|"]
    lines += [_row(window, " · ".join(names)) for window, names in groups.items()]
    if any(reasons.values()):
        lines += ["", "| not supported | |", "|---|---|"]
        lines += [_row(text, " · ".join(names)) for text, names in reasons.items() if names]
    wrong = [f"- **{r.name}**: {'; '.join(r.problems)}" for r in records if r.problems]
    return "\n".join([*lines, *(["", *wrong] if wrong else [])])


def _recorded(records: list[Record]) -> str:
    return " · ".join(sorted(record.name for record in records if record.recorded))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _examined(name: str) -> Record:
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return examine(name)


def main(argv: list[str] | None = None) -> int:
    """Examine all or the named architectures; problems go to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, help="write the page to this file instead of stdout")
    options = parser.parse_args(argv)
    names = options.names or list(ARCHITECTURES)
    records = []
    with get_context("spawn").Pool(options.jobs) as pool:
        for record in pool.imap(_examined, names):
            records.append(record)
            line = f"{record.name}: {'; '.join(record.problems) or 'ok'}"
            extra = f"{record.seconds:.1f} s, {record.distinct} distinct"
            print(f"{line} ({extra}, {record.accepted} accepted)", file=sys.stderr, flush=True)
    text = page(records)
    if options.out is None:
        print(text, end="")
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    wrong = [record.name for record in records if record.problems]
    print(f"{len(records) - len(wrong)} of {len(records)} as expected", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())


def scale_products(monkeypatch, factor):
    """Let the kernel of linear layers multiply several tokens otherwise than one."""
    right = linear.products

    def wrong(x, *others, **options):
        results = right(x, *others, **options)
        return [factor * one for one in results] if x.shape[-2] > 1 else results

    monkeypatch.setattr(linear, "products", wrong)
