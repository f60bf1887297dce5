"""Summary of a run: figures, machine, model and settings as JSON types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from token_recycling.bench import measures
from token_recycling.bench.decoders import Decoder
from token_recycling.bench.measures import Record
from token_recycling.bench.variants import BASELINE, PLAIN
from token_recycling.decoding.text import TextStream
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.limits import text_config
from token_recycling.recycler import TokenRecycling

FORMAT = "token-recycling-bench-2"
LOSING = 30  # maximum number of prompts listed
PROMPT = 120  # characters shown of a prompt


def describe_model(recycler: TokenRecycling, name: str) -> dict[str, Any]:
    """Return name, size, dtype and shape of the model."""
    config = text_config(recycler.model.config)
    widened = getattr(recycler.model.config, "widened", None)
    note = None
    if isinstance(widened, dict):
        note = f"{widened.get('from')} widened to the shape of {widened.get('to')}"
        if widened.get("differs"):
            note += f" ({'; '.join(widened['differs'])})"
    return {
        "name": name,
        "parameters": sum(p.numel() for p in recycler.model.parameters()),
        "dtype": str(recycler.model.dtype).removeprefix("torch."),
        "vocab_size": recycler.target.vocab_size,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
        "note": note,
    }


def losing(records: Sequence[Record], names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the questions that a variant answered more slowly than the baseline, worst first."""
    rows = []
    for record in records:
        for name in names:
            ratio = measures.speed(record, name) / measures.speed(record, BASELINE)
            if ratio >= 1:
                continue
            first = measures.turns(record, name, 0)
            rows.append(
                {
                    "name": record["name"],
                    "kind": record["kind"],
                    "decoder": name,
                    "speedup": ratio,
                    "mat": measures.mean_accepted(measures.accept_lengths(first)),
                    "tokens": sum(len(turn["token_ids"]) for turn in first),
                    "prompt": " ".join(record["prompt"].split())[:PROMPT],
                }
            )
    return sorted(rows, key=lambda row: row["speedup"])[:LOSING]


def sample(records: Sequence[Record], name: str, tokenizer: Any) -> dict[str, Any] | None:
    """Return the question of median speed with its answer in pieces, each marked drafted or not."""
    if not records or tokenizer is None:
        return None
    record = sorted(records, key=lambda r: measures.speed(r, name))[len(records) // 2]
    turn = measures.turns(record, name, 0)[0]
    drafted = [False]  # the first token comes from prefill
    for length in turn["accept_lengths"]:
        drafted += [True] * (length - 1) + [False]
    reader = TextStream(tokenizer)
    for token in turn["token_ids"]:
        reader.feed(token)
    reader.finish()
    pieces = [[text, draft] for text, draft in zip(reader.pieces, drafted) if text]
    prompt = record["prompt"]
    return {"name": record["name"], "decoder": name, "prompt": prompt, "pieces": pieces}


def summarise(
    records: Sequence[Record],
    decoders: dict[str, Decoder],
    *,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run.

    Questions whose answers only repeat themselves (see ``measures.repeats``) are listed, and not
    counted in ``overall``, ``kinds`` and ``rounds``.

    Args:
        records: of all questions.
        decoders: by name, the baseline first.
        about: date, machine, model, settings, questions and omitted questions; copied unchanged.
    """
    repeating = [record["name"] for record in records if measures.repeating(record)]
    # All of them if none is left.
    counted = [record for record in records if record["name"] not in repeating] or records
    kinds = measures.by_kind(counted)
    reference = PLAIN if PLAIN in decoders else BASELINE
    table: dict[str, Any] = {}
    for name, decoder in decoders.items():
        variant = decoder.variant
        repeated = [
            measures.speedup(counted, name, r) for r in range(measures.rounds(records[0], name))
        ]
        peaks = [r["variants"][name].get("peak_memory_bytes") for r in records]
        recycles = variant.recycles and not isinstance(decoder.recycler.target, PlainTarget)
        table[name] = {
            "about": {
                **variant.settings(),
                "k": decoder.recycler.matrix.k if recycles else None,
                "prompts": decoder.recycler.drafter.prompts if recycles else None,
                "size": decoder.size,
            },
            "overall": measures.measure(counted, name, reference),
            "spec_bench": measures.spec_bench(records, name),
            "kinds": {
                kind: measures.measure(rows, name, reference) for kind, rows in kinds.items()
            },
            "step_costs": measures.step_costs(measures.every_turn(counted, name)),
            "rounds": repeated,
            "spread": measures.spread(repeated),
            "peak_memory_bytes": max((p for p in peaks if p), default=None),
            "why_plain": decoder.recycler.draft_size.why_plain() if variant.drafter else None,
            "matrix_bytes": decoder.recycler.matrix.nbytes if recycles else None,
        }
    tokenizer = next(iter(decoders.values())).recycler.tokenizer
    drafting = [name for name, decoder in decoders.items() if decoder.variant.drafter]
    return {
        "format": FORMAT,
        "baseline": BASELINE,
        "reference": reference,
        "kinds": list(kinds),
        "decoders": table,
        "losing": losing(records, drafting),
        "repeating": repeating,
        "sample": sample(records, drafting[-1], tokenizer) if drafting else None,
        "per_question": {
            name: [
                {
                    "tokens": measures.new_tokens(record, name),
                    "tokens_per_second": measures.speed(record, name),
                    "matrix_rows_before": record["variants"][name]["matrix_rows_before"],
                }
                for record in records
            ]
            for name in decoders
        },
        **about,
    }
