"""Train the bundled demonstration model: a small Llama with its own BPE tokenizer.

    python lab/train_demo_model.py --data ../shared/data --out build/demo-model

Corpora: public-domain stories (books.txt.xz), GSM8K (MIT) and the functions of the running
Python's standard library (PSF licence). The run resumes from its last checkpoint, shows its
progress, and ends by writing a Transformers checkpoint (float16) and a model card with the
held-out loss and the share of greedy answers that loop.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jinja2 import Environment, StrictUndefined
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import demo_corpus as corpus
import script
from demo_corpus import ASSISTANT, BEGIN, END, PAD, USER, Documents, load_documents
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.util.files import write_atomically

CARD = Path(__file__).with_name("demo_model.md.j2")
VOCABULARY = 4096
SPECIAL = [BEGIN, USER, ASSISTANT, END, PAD]
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}
TOKENS_PER_STEP = 4096
# The share of the steps (the last ones) that lowers the learning rate, reads longer rows and
# unlearns loops.
DECAY_SHARE = 0.25
LONG_ROW, SHORT_ROW = 1024, 256
LOOP_PROMPTS, LOOP_TOKENS = 16, 90  # greedy answers looked through for loops, in one step
LOOP_WEIGHT = 0.1  # at 1.0 the answers fell apart into words that no text has


# --- tokenizer and rows --------------------------------------------------------------------------


def train_tokenizer(documents: Documents) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    kinds = ("stories", "maths", "maths", "python")
    bpe.train_from_iterator((text for kind in kinds for text in documents.train[kind]), trainer)
    begin = (BEGIN, bpe.token_to_id(BEGIN))
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=(BUNDLED_MODEL / "chat_template.jinja").read_text("utf-8"),
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def endless(documents: list[list[int]], seed: int) -> Iterator[int]:
    """Yield the tokens of documents, end to end, shuffled anew each time round."""
    rng = random.Random(seed)
    while True:
        for number in reversed(rng.sample(range(len(documents)), len(documents))):
            yield from documents[number]


def repeats(row: list[int], begin: int, n: int = 5) -> list[bool]:
    """For every token from ``begin`` on: does it end an n-gram that came before, from there?"""
    seen: set[tuple[int, ...]] = set()
    result = []
    for i in range(begin, len(row)):
        gram = tuple(row[max(begin, i - n + 1) : i + 1])
        result.append(len(gram) == n and gram in seen)
        seen.add(gram)
    return result


def unlikelihood(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> torch.Tensor:
    """Sequence-level unlikelihood (Welleck et al. 2019, arXiv 1908.04319): let the model answer
    greedily, and make every token that ends a repeated n-gram less likely. Returns a scalar."""
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    model.eval()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=LOOP_TOKENS, do_sample=False)
    model.train()
    begin = ids.shape[1]
    repeated = torch.tensor([repeats(row, begin) for row in out.tolist()])
    repeated &= out[:, begin:] != tokenizer.pad_token_id
    whole = torch.cat([mask, torch.ones_like(out[:, begin:])], dim=1)
    positions = (whole.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=out, attention_mask=whole, position_ids=positions).logits
    chosen = logits[:, begin - 1 : -1].softmax(-1).gather(2, out[:, begin:, None])[:, :, 0]
    return -(torch.log1p(-chosen.clamp(max=0.999)) * repeated).sum() / repeated.sum().clamp(min=1)


# --- training ----------------------------------------------------------------------------------


def rate(step: int, steps: int) -> float:
    """Warm up, hold, then fall linearly to 3 % over the last ``DECAY_SHARE`` of the steps."""
    decay = max(1, int(steps * DECAY_SHARE))
    return min(1.0, (step + 1) / 60, 0.03 + 0.97 * max(0, steps - step) / decay)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration (Jordan 2024), in float32.

    ``torch.optim.Muon`` iterates in bfloat16, which on a CPU without bfloat16 units took three
    times as long as the forward and backward pass together.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, same in by_shape.items():
                for p in same:
                    self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                x = torch.stack([p.grad.lerp(self.state[p]["momentum"], 0.95) for p in same])
                x = x.mT if shape[0] > shape[1] else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(5):
                    square = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
                x = x.mT if shape[0] > shape[1] else x
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, direction in zip(same, x, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(direction, alpha=-group["lr"] * scale)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        Muon(matrices, lr=0.02, weight_decay=0.02),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, rows: dict[str, list[int]]) -> dict[str, float]:
    """Nats per token on the first 24k held-out tokens of each kind, in rows of 512."""
    result = {}
    for kind, tokens in rows.items():
        ids = torch.tensor(tokens[: len(tokens) // 512 * 512][:24576]).view(-1, 512)
        result[kind] = sum(model(input_ids=i, labels=i).loss.item() for i in ids.split(8)) / len(
            ids.split(8)
        )
    return result


def loops(tokens: list[int], longest: int = 32) -> bool:
    """True when the last 2 x ``longest`` tokens repeat themselves after ``longest`` or fewer."""
    tail = tokens[-2 * longest :]
    return len(tail) == 2 * longest and any(tail[n:] == tail[:-n] for n in range(1, longest + 1))


@torch.inference_mode()
def greedy_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: Documents, each: int
) -> list[tuple[str, str, bool]]:
    """(question, greedy answer, loops) for ``each`` held-out questions of every chat kind."""
    result = []
    for kind in ("maths", "story tasks", "python"):
        for text in documents.held_out[kind][:each]:
            prompt = text[: text.index(ASSISTANT) + len(ASSISTANT)]
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False
            )[0, ids.shape[1] :].tolist()
            answer = tokenizer.decode(out, skip_special_tokens=True)
            result.append((prompt.split(USER)[1].split(ASSISTANT)[0], answer, loops(out)))
    return result


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }


def write_model(
    out: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Documents,
    losses: dict[str, float],
    state: dict[str, Any],
) -> None:
    model.eval()
    answers = greedy_answers(model, tokenizer, documents, each=20)
    model.generation_config.update(**special_ids(tokenizer))
    model.half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    about = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": state["step"],
        "tokens_seen": state["step"] * TOKENS_PER_STEP,
        "seconds": round(state["seconds"]),
        "held_out_nats_per_token": {kind: round(loss, 3) for kind, loss in losses.items()},
        "greedy_answers": len(answers),
        "greedy_answers_that_loop": sum(looped for *_, looped in answers),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(["python", *sys.argv]),
        "samples": [{"prompt": q, "answer": a, "loops": x} for q, a, x in answers[::6]],
    }
    script.save(out / "training.json", about)
    card = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    text = CARD.read_text("utf-8")
    about |= {"mix": corpus.MIX, "authors": corpus.STORY_AUTHORS, "held_out": corpus.HELD_OUT_BOOK}
    (out / "README.md").write_text(card.from_string(text).render(about))


def main(
    data: Annotated[Path, typer.Option(help="Folder with books.txt.xz and gsm8k_*.jsonl.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished model; its checkpoints too.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of 4,096 tokens.")] = 4000,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
) -> None:
    """Train, or go on training, and write the model to OUT when the last step is done."""
    for name in ("books.txt.xz", "gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        if not (data / name).is_file():
            raise typer.BadParameter(f"{data / name} does not exist", param_hint="--data")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    documents = load_documents(data)
    if (out / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    else:
        tokenizer = train_tokenizer(documents)
        tokenizer.save_pretrained(out)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False).input_ids if texts else []

    encoded = {kind: encode(texts) for kind, texts in documents.train.items()}
    answering = tokenizer.convert_tokens_to_ids(ASSISTANT)
    questions = [
        row[: row.index(answering) + 1]
        for kind in ("maths", "story tasks", "python")
        for row in encoded[kind]
        if row.index(answering) < 120
    ]
    held = {k: [t for d in encode(texts) for t in d] for k, texts in documents.held_out.items()}
    for kind, rows in encoded.items():
        print(f"{kind}: {len(rows)} documents, {sum(map(len, rows)):,} tokens", file=sys.stderr)

    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **special_ids(tokenizer)))
    optimizers = make_optimizers(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    state: dict[str, Any] = {"step": 0, "seconds": 0.0}
    checkpoint = out / "checkpoint.pt"
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        state = saved["state"]

    def save() -> None:
        values = [optimizer.state_dict() for optimizer in optimizers]
        kept = {"model": model.state_dict(), "optimizers": values, "state": state}
        write_atomically(checkpoint, lambda partial: torch.save(kept, partial))

    # A resumed run draws other rows than the ones already seen, not the same ones again.
    sources = {k: endless(rows, seed + 1 + state["step"]) for k, rows in encoded.items()}
    rng = random.Random(seed + 1 + state["step"])
    with Progress() as progress:
        task = progress.add_task("training", total=steps, completed=state["step"])
        while state["step"] < steps:
            began, step = time.perf_counter(), state["step"]
            settling = step >= steps * (1 - DECAY_SHARE)
            length = LONG_ROW if settling and step % 2 == 0 else SHORT_ROW
            count = TOKENS_PER_STEP // length
            kinds = rng.choices(list(corpus.MIX), list(corpus.MIX.values()), k=count)
            ids = torch.tensor([list(islice(sources[kind], length)) for kind in kinds])
            loss = model(input_ids=ids, labels=ids).loss
            total = loss
            if settling and step % 2:
                asked = [rng.choice(questions) for _ in range(LOOP_PROMPTS)]
                total = loss + LOOP_WEIGHT * unlikelihood(model, tokenizer, asked)
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate(step, steps)
                optimizer.step()
                optimizer.zero_grad()
            state["step"] += 1
            state["seconds"] += time.perf_counter() - began
            value = loss.item()
            if not math.isfinite(value):
                raise SystemExit(f"the loss is {value} at step {step}")
            progress.update(task, advance=1, description=f"loss {value:.3f}")
            if state["step"] % 100 == 0:
                save()
    save()
    model.eval()
    losses = held_out_loss(model, held)
    write_model(out, model, tokenizer, documents, losses, state)
    print(json.dumps(losses))


if __name__ == "__main__":
    script.run(main)
