"""What a step knows of the token after next: runners-up, early exits, probe rows, rejected tokens.

    python lab/probes.py --model FOLDER --data ../shared/data --answers RECORDS.pt

prints, over recorded greedy answers of the fitting half (see ``lab/record.py``), how often the
token after next is the first, among the first 3 and among the first 12 candidates of each.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from questions import FIT, half, questions
from record import Recording
from replay import read

CANDIDATES, LONGEST_PROMPT = 12, 900
LAYERS = (10, 15, 20, 24, 27)  # early exits
FIRST = (1, 3, 12)


def mask_of(length: int, begin: int, count: int) -> Tensor:
    """Return the mask of a text and of two groups of ``count`` single rows behind it.

    Row j of a group follows token ``begin`` + j. Bool [t, t], t = length + 2 · count.
    """
    total = length + 2 * count
    mask = torch.eye(total, dtype=torch.bool)
    mask[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    for group in range(2):
        for j in range(count):
            mask[length + group * count + j, : begin + j + 1] = True
    return mask


@torch.inference_mode()
def candidates(model: Any, one: Recording) -> tuple[dict[str, Tensor], list[int]]:
    """Return the candidates int64 [n, 12] of each source, and the tokens that they should have."""
    ids = torch.tensor([*one.prompt, *one.answer])
    begin, count = len(one.prompt) - 1, len(one.answer) - 2
    at = torch.arange(
        begin, begin + count
    )  # predicts the root; the token after next is ids[at + 2]
    embeddings = model.model.embed_tokens(ids)
    plain = model.model(inputs_embeds=embeddings[None], output_hidden_states=True)

    def best(hidden: Tensor, k: int = CANDIDATES) -> Tensor:
        return model.lm_head(hidden).topk(k).indices

    top = best(plain.last_hidden_state[0, at], CANDIDATES + 1)
    roots = ids[at + 1, None]
    others = [
        [t for t in row if t != root] for row, root in zip(top.tolist(), roots[:, 0].tolist())
    ]
    losers = torch.tensor([row[:CANDIDATES] for row in others])
    probe = embeddings[: len(one.prompt)].mean(0).expand(count, -1)
    more = torch.cat([probe, model.model.embed_tokens(losers[:, 0])])
    mask = mask_of(len(ids), begin, count)
    hidden = model.model(
        inputs_embeds=torch.cat([embeddings, more])[None],
        attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e9)[None, None],
        position_ids=torch.cat([torch.arange(len(ids)), at + 1, at + 1])[None],
    ).last_hidden_state[0]
    assert torch.allclose(hidden[: len(ids)], plain.last_hidden_state[0], atol=1e-2)
    behind, rejected = best(hidden[len(ids) :]).split(count)
    found = {
        "runners-up of the root": losers,
        "probe row behind the last node": behind,
        "best other token in the root's place": rejected,
    }
    for layer in LAYERS:
        found[f"layer {layer}"] = best(model.model.norm(plain.hidden_states[layer][0, at]))
    return found, ids[at + 2].tolist()


def main(
    model: Annotated[str, typer.Option(help="Checkpoint.")],
    data: Annotated[Path, typer.Option(help="Folder of the question files.")],
    answers: Annotated[Path, typer.Option(help="Written by record.py.")],
    most: Annotated[int, typer.Option(help="Answers at most.")] = 40,
) -> None:
    """Print the table."""
    torch.set_num_threads(2)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    by_name = {one.name: one for one in read(answers)}
    names = [question.name for question in half(questions(data), FIT)]
    chosen = [by_name[name] for name in names if name in by_name][:most]
    hits: Counter[tuple[str, int]] = Counter()
    total = 0
    for one in chosen:
        if len(one.prompt) > LONGEST_PROMPT or len(one.answer) < 8:
            continue
        found, truth = candidates(loaded, one)
        total += len(truth)
        for name, rows in found.items():
            for row, token in zip(rows.tolist(), truth):
                for first in FIRST:
                    hits[name, first] += token in row[:first]
    print(f"{total} positions")
    for name in found:
        shares = (f"{hits[name, first] / total:6.1%}" for first in FIRST)
        print(f"{name:40}", *shares)


if __name__ == "__main__":
    typer.run(main)
