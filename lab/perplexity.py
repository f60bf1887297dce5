"""What packed weights change beside dequantised ones: perplexity, KL divergence, best tokens.

    python lab/perplexity.py FILE --text books.txt.xz [--tokens 20000] [--kinds Q4_0,Q8_0]
    python lab/perplexity.py FILE --text books.txt.xz --tokens 8192 --llamacpp VENV/bin/python

Text is read 256 tokens at a time, of which the kernels get 128 at once. ``--kinds`` quantises the
weights of the file anew, to types that the package gguf can write. ``--llamacpp`` asks llama.cpp
(see ``llamacpp.py``) about the same positions. ``--questions`` says how many greedy answers are
those of the dequantised weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import gguf
import torch
import typer

from llamacpp import LlamaCpp
from script import read_text, run
from skinny_kernels.linear import FEW_TOKENS
from skinny_kernels.packed import PackedEmbedding, PackedLinear, interleaved, read_rows
from token_recycling import TokenRecycling
from token_recycling.bench.suites import load_all
from token_recycling.checkpoint.load import load_checkpoint
from token_recycling.decoding.text import encode

LENGTH = 2 * FEW_TOKENS
ANSWER = 64  # tokens of an answer
BEST = 1000  # tokens whose probabilities are compared one by one; all others count as one


class Beside:
    """Figures of one model beside those of the dequantised one, position by position."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.positions: list[torch.Tensor] = []  # float64 [n, 3] each

    def add(
        self, right: torch.Tensor, ids: torch.Tensor, logs: torch.Tensor, after: torch.Tensor
    ) -> None:
        """Add positions.

        Args:
            right: log probabilities of the dequantised model, float32 [n, V].
            ids: the ``BEST`` best tokens, best first, int64 [n, BEST].
            logs: their log probabilities, float [n, BEST].
            after: the tokens that follow in the text, int64 [n].
        """
        p, q = right.gather(1, ids).double(), logs.double()
        rest, own_rest = ((1 - x.exp().sum(1)).clamp(min=1e-12) for x in (p, q))
        divergence = (p.exp() * (p - q)).sum(1) + rest * (rest / own_rest).log()
        same = right.argmax(1) == ids[:, 0]
        # Perplexity: over the positions whose token is among the best
        loss = ((p - q) * (ids == after[:, None])).sum(1)
        self.positions.append(torch.stack([divergence, same.double(), loss], dim=1))

    def line(self) -> str:
        """Return all figures."""
        divergence, same, loss = torch.cat(self.positions).unbind(1)
        mean, count = divergence.mean(), len(divergence)
        middle, most = (divergence.sort().values[int(share * count)] for share in (0.5, 0.99))
        return (
            f"{self.name}: {count} tokens, perplexity {100 * loss.mean().expm1():+.2f} %, "
            f"same best token {100 * same.mean():.1f} %, KL mean {mean:.4f}, "
            f"median {middle:.4f}, 99 % {most:.4f}"
        )


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a text, read in parts that the kernels take."""
    cache, found = None, []
    for part in ids.split(FEW_TOKENS):
        output = model(input_ids=part[None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[0])
    return torch.cat(found)


def dequantised(module: PackedLinear | PackedEmbedding) -> torch.Tensor:
    """Return the numbers of a packed weight."""
    rows = getattr(module, "out_features", getattr(module, "num_embeddings", 0))
    return read_rows(module.weight, module.ggml_type, torch.arange(rows))


def requantised(model: Any, kind: gguf.GGMLQuantizationType) -> None:
    """Quantise the weights of a packed model anew."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            own = module.weight
            if id(own) not in known:
                blocks = torch.from_numpy(gguf.quants.quantize(dequantised(module).numpy(), kind))
                weight = interleaved(blocks, int(kind))
                known[id(own)] = torch.nn.Parameter(weight, requires_grad=False)
            module.weight, module.ggml_type = known[id(own)], int(kind)


def dense(model: Any) -> Any:
    """Return a copy of a packed model with dequantised weights."""
    with torch.device("meta"):
        found = type(model)(model.config).float().eval()
    weights: dict[str, torch.Tensor] = {}
    packed = {name: one for name, one in model.named_modules() if hasattr(one, "ggml_type")}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = packed.get(name.rpartition(".")[0])
        if module is not None and name.endswith("weight"):
            weights[name] = dequantised(module)
        else:
            weights[name] = parameter.detach()
    found.load_state_dict(weights, assign=True)
    found.model.rotary_emb = model.model.rotary_emb
    return found


def answers(file: Path, questions: Path, foreign: LlamaCpp | None) -> str:
    """Return how many answers of ``ANSWER`` tokens are those of the dequantised weights."""
    right = TokenRecycling.from_pretrained(file, device="cpu", dequantize=True)
    packed, same, count = TokenRecycling.from_pretrained(file, device="cpu"), [0, 0], 0
    for question in load_all([str(questions)], 3):
        chat = [{"role": "user", "content": question.turns[0]}]
        ids = encode(right.tokenizer, chat)
        expected = right.generate(ids, max_new_tokens=ANSWER)
        found = packed.generate(ids, max_new_tokens=ANSWER)
        same[0] += found.token_ids == expected.token_ids
        if foreign is not None:
            same[1] += foreign.answer(ids, ANSWER, False)["text"] == expected.text
        count += 1
    told = f", of llama.cpp {same[1]}" if foreign is not None else ""
    return f"of {count} answers of {ANSWER} tokens the same: packed {same[0]}{told}"


def main(
    file: Path,
    text: Annotated[Path, typer.Option(help="plain or .xz")],
    tokens: int = 20_000,
    kinds: str = "",
    threads: int = 2,
    llamacpp: Annotated[Path | None, typer.Option(help="Python with xllamacpp")] = None,
    questions: Annotated[Path | None, typer.Option(help="of lab/questions.py")] = None,
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    raw = read_text(text)
    for name in kinds.split(","):
        model, tokenizer = load_checkpoint(file, "cpu")
        if name:
            requantised(model, gguf.GGMLQuantizationType[name])
        right = dense(model)
        ids = tokenizer(raw[: 8 * tokens], return_tensors="pt").input_ids[0][:tokens]
        own, theirs, foreign = Beside(name or file.name), Beside("llama.cpp"), None
        if llamacpp is not None and not name:
            foreign = LlamaCpp(llamacpp, file, threads, 8192, "none")
        with torch.inference_mode():
            for part in (part for part in ids.split(LENGTH) if len(part) > 1):
                packed, rights = (logits(one, part).log_softmax(-1)[:-1] for one in (model, right))
                logs, best = packed.topk(BEST)
                own.add(rights, best, logs, part[1:])
                if foreign is not None:
                    told = [foreign.best(part[: i + 1].tolist(), BEST) for i in range(len(rights))]
                    pairs = torch.tensor(told, dtype=torch.float64)
                    theirs.add(rights, pairs[..., 0].long(), pairs[..., 1], part[1:])
        for beside in (own, theirs) if foreign is not None else (own,):
            print(beside.line(), flush=True)
        if questions is not None and not name:
            print(answers(file, questions, foreign), flush=True)


if __name__ == "__main__":
    run(main)
