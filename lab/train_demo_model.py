"""Train the bundled demonstration model: a small Llama with its own BPE tokenizer.

    python lab/train_demo_model.py --data ../shared/data --out build/demo-model

Corpora: public-domain stories (books.txt.xz), GSM8K (MIT) and the functions of the running
Python's standard library (PSF licence). The run resumes from its last checkpoint, shows its
progress, and ends by writing a Transformers checkpoint (float16) and a model card with the
held-out loss and the share of greedy answers that loop.
"""

from __future__ import annotations

import ast
import json
import lzma
import math
import os
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
BEGIN, USER, ASSISTANT, END, PAD = "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL = [BEGIN, USER, ASSISTANT, END, PAD]
# The model has not been trained to call tools; the template has them to try a client with.
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% if tools %}{{ '<|user|>These functions can be called:\\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\\n' }}{% endfor %}"
    "{{ 'To call one, write <tool_call>\\n"
    '{"name": NAME, "arguments": OBJECT}'
    "\\n</tool_call>' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    """{{ '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' """
    """+ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}{% endfor %}"""
    "{{ '<|end|>' }}{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
# Plain prose first: a model this small writes better sentences from simpler books.
STORY_AUTHORS = (
    "Aesop", "Arthur Conan Doyle", "Beatrix Potter", "Edith Nesbit", "Frances Hodgson Burnett",
    "Hans Christian Andersen", "J. M. Barrie", "Kenneth Grahame", "L. Frank Baum", "Lewis Carroll",
    "Robert Louis Stevenson", "The Brothers Grimm",
)  # fmt: skip
HELD_OUT_BOOK = "The Wind in the Willows"
MIX = {"stories": 0.30, "story tasks": 0.27, "maths": 0.31, "python": 0.12}
TOKENS_PER_STEP = 4096
# The share of the steps (the last ones) that lowers the learning rate, reads longer rows and
# unlearns loops.
DECAY_SHARE = 0.25
LONG_ROW, SHORT_ROW = 1024, 256
LOOP_PROMPTS, LOOP_TOKENS = 16, 90  # greedy answers looked through for loops, in one step
LOOP_WEIGHT = 0.1  # at 1.0 the answers fell apart into words that no text has


# --- documents ---------------------------------------------------------------------------------


@dataclass
class Documents:
    """Texts by kind; the held-out ones are never trained on."""

    train: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in MIX})
    held_out: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in MIX})

    def add(self, kind: str, text: str, held_out: bool) -> None:
        (self.held_out if held_out else self.train)[kind].append(text)


def chat(question: str, answer: str) -> str:
    return f"{BEGIN}{USER}{question}{ASSISTANT}{answer}{END}"


def read_books(data: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (author, title, text) of every book."""
    text = lzma.decompress((data / "books.txt.xz").read_bytes()).decode()
    for book in re.split(r"(?m)^(?=# Title: )", text):
        head = re.match(r"# Title: (.*)\n\s*## Author: (.*)\n", book)
        if head:
            yield head[2].strip(), head[1].strip(), book[head.end() :]


def clean(text: str) -> str:
    for old, new in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("—", "--"), ("_", "")):
        text = text.replace(old, new)
    return re.sub(r"[ \t]+", " ", text).strip()


def passages(paragraphs: list[str], limit: int) -> Iterator[str]:
    """Join neighbouring paragraphs up to about ``limit`` characters."""
    held: list[str] = []
    for paragraph in paragraphs:
        if held and sum(map(len, held)) + len(paragraph) > limit:
            yield "\n\n".join(held)
            held = []
        held.append(paragraph)
    if held:
        yield "\n\n".join(held)


def add_stories(documents: Documents, data: Path, rng: random.Random) -> None:
    openers = ("Continue the story:", "What happens next?", "Go on with this story:")
    for author, title, text in read_books(data):
        if author not in STORY_AUTHORS:
            continue
        held_out = title == HELD_OUT_BOOK
        chapters = re.split(r"(?m)^##+ (.*)$", text)
        for heading, body in zip(["", *chapters[1::2]], chapters[0::2], strict=True):
            paragraphs = [clean(p) for p in body.split("\n\n")]
            paragraphs = [p for p in paragraphs if len(p) > 1 and not p.startswith(("#", "---"))]
            for passage in passages(paragraphs, 3000):
                documents.add("stories", f"{BEGIN}{passage}{END}", held_out)
            name = clean(heading).title()
            if (
                paragraphs
                and 8 < len(name) < 60
                and not re.match(r"(chapter|year)\b", name.lower())
            ):
                answer = next(passages(paragraphs, 900))
                documents.add(
                    "story tasks", chat(f"Tell me the story of {name}.", answer), held_out
                )
            for passage in passages(paragraphs, 1100):
                sentences = re.split(r"(?<=[.!?\"]) (?=[A-Z\"])", passage, maxsplit=2)
                if len(sentences) == 3 and len(sentences[2]) > 200:
                    start, rest = " ".join(sentences[:2]), sentences[2]
                    cut = rest[:900].rfind(". ")
                    rest = rest if len(rest) < 900 or cut < 0 else rest[: cut + 1]
                    kind = rng.randrange(4)
                    ask = f"{openers[kind]} {start}" if kind < 3 else f"Write like {author}."
                    answer = rest if kind < 3 else f"{start} {rest}"
                    documents.add("story tasks", chat(ask, answer), held_out)


def add_maths(documents: Documents, data: Path) -> None:
    for name, held_out in (("gsm8k_train.jsonl", False), ("gsm8k_test.jsonl", True)):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answer = re.sub(r"<<.*?>>", "", row["answer"])
            answer = re.sub(r"\n#### (.*)", r"\nThe answer is \1.", answer)
            documents.add("maths", chat(row["question"], answer), held_out)


def add_python(documents: Documents, rng: random.Random) -> None:
    """Functions with a docstring, asked for by the docstring's first line."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(relative.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree, lines = ast.parse(source), source.split("\n")
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            code = re.sub(rf"(?m)^ {{{node.col_offset}}}", "", code)
            if 20 < len(summary) < 160 and 60 < len(code) < 1500:
                question = f"Write a Python function: {summary}"
                documents.add("python", chat(question, code), rng.random() < 0.03)


def load_documents(data: Path) -> Documents:
    documents, rng = Documents(), random.Random(0)
    add_stories(documents, data, rng)
    add_maths(documents, data)
    add_python(documents, rng)
    return documents


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
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


class Rows:
    """Endless rows of one kind: its documents, shuffled anew each time round, end to end."""

    def __init__(self, documents: list[list[int]], seed: int) -> None:
        self.documents, self.rng = documents, random.Random(seed)
        self.buffer: list[int] = []
        self.order: list[int] = []

    def take(self, length: int) -> list[int]:
        while len(self.buffer) < length:
            if not self.order:
                self.order = self.rng.sample(range(len(self.documents)), len(self.documents))
            self.buffer += self.documents[self.order.pop()]
        row, self.buffer = self.buffer[:length], self.buffer[length:]
        return row


def left_padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different length as ids and attention mask, both [B, longest]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def repeats(row: list[int], begin: int, n: int = 5) -> list[bool]:
    """For every token from ``begin`` on: does it end an n-gram that came before, from there?"""
    seen: set[tuple[int, ...]] = set()
    result = []
    for i in range(begin, len(row)):
        gram = tuple(row[max(begin, i - n + 1) : i + 1])
        result.append(len(gram) == n and gram in seen)
        seen.add(gram)
    return result


def unlikelihood(model: LlamaForCausalLM, prompts: list[list[int]], pad: int) -> torch.Tensor:
    """Sequence-level unlikelihood (Welleck et al. 2019, arXiv 1908.04319): let the model answer
    greedily, and make every token that ends a repeated n-gram less likely. Returns a scalar."""
    ids, mask = left_padded(prompts, pad)
    model.eval()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=LOOP_TOKENS, do_sample=False)
    model.train()
    begin = ids.shape[1]
    repeated = torch.tensor([repeats(row, begin) for row in out.tolist()])
    repeated &= out[:, begin:] != pad
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


CARD = """# The bundled demonstration model

A Llama of {parameters:,} parameters (6 layers of width 192, byte-level BPE of 4,096), float16.
It is a demonstration: the first command works without a network and without a GPU, and tests have
a model to run on. It writes readable English but is not an assistant, and its arithmetic is wrong
more often than right. For real use, pass the name of a real model.

## Data and licences

| What | Share of the training tokens | Licence |
|---|---|---|
| Stories of {authors} | {stories:.0%} | public domain |
| Questions made from the same stories (continue, tell, write like) | {tasks:.0%} | public domain |
| GSM8K, training part | {maths:.0%} | MIT (Copyright (c) 2021 OpenAI) |
| Functions with docstrings from Python's standard library | {python:.0%} | PSF licence |

Held out from training: *{held_out}*, GSM8K's test part, 3 % of the functions.
The weights and the tokenizer are under this project's licence (Apache-2.0).

## Training

    {command}

{steps:,} steps of {tokens_per_step:,} tokens ({tokens_seen:,} tokens, {hours:.1f} hours on one or
two CPU cores shared with other work). Muon for the blocks, AdamW for the rest; constant learning
rate, then linear decay. In the last quarter, every other step also makes repeated 5-grams in the
model's own greedy answers less likely (unlikelihood, arXiv 1908.04319).

Measured at the end:

| Held-out text | Loss (nats per token) |
|---|---|
{losses}

{looping} of {answers} greedy answers of up to 200 tokens to held-out prompts (20 each: GSM8K test
questions, story tasks from the held-out book, held-out functions) end in a loop. Samples are in
`training.json`.
"""


def model_card(about: dict[str, Any]) -> str:
    """Write the card from what was measured."""
    losses = about["held_out_nats_per_token"]
    return CARD.format(
        parameters=about["parameters"],
        authors=", ".join(STORY_AUTHORS),
        stories=MIX["stories"],
        tasks=MIX["story tasks"],
        maths=MIX["maths"],
        python=MIX["python"],
        held_out=HELD_OUT_BOOK,
        command=about["command"],
        steps=about["steps"],
        tokens_per_step=TOKENS_PER_STEP,
        tokens_seen=about["tokens_seen"],
        hours=about["seconds"] / 3600,
        losses="\n".join(f"| {kind} | {loss:.2f} |" for kind, loss in losses.items()),
        looping=about["greedy_answers_that_loop"],
        answers=about["greedy_answers"],
    )


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
    looping = sum(looped for *_, looped in answers)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
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
        "greedy_answers_that_loop": looping,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(["python", *sys.argv]),
        "samples": [{"prompt": q, "answer": a, "loops": x} for q, a, x in answers[::6]],
    }
    (out / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    (out / "README.md").write_text(model_card(about))


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

    config = LlamaConfig(
        **SHAPE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
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
        partial = checkpoint.with_suffix(".partial")
        values = [optimizer.state_dict() for optimizer in optimizers]
        torch.save({"model": model.state_dict(), "optimizers": values, "state": state}, partial)
        partial.replace(checkpoint)

    # A resumed run draws other rows than the ones already seen, not the same ones again.
    sources = {k: Rows(rows, seed + 1 + state["step"]) for k, rows in encoded.items()}
    rng = random.Random(seed + 1 + state["step"])
    log = (out / "log.jsonl").open("a")
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, completed=state["step"])
        while state["step"] < steps:
            began, step = time.perf_counter(), state["step"]
            settling = step >= steps * (1 - DECAY_SHARE)
            length = LONG_ROW if settling and step % 2 == 0 else SHORT_ROW
            kinds = rng.choices(list(MIX), list(MIX.values()), k=TOKENS_PER_STEP // length)
            ids = torch.tensor([sources[kind].take(length) for kind in kinds])
            loss = model(input_ids=ids, labels=ids).loss
            total = loss
            if settling and step % 2:
                asked = [rng.choice(questions) for _ in range(LOOP_PROMPTS)]
                total = loss + LOOP_WEIGHT * unlikelihood(model, asked, tokenizer.pad_token_id)
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
            if step % 20 == 0:
                log.write(json.dumps({"step": step, "loss": round(value, 4)}) + "\n")
                log.flush()
            progress.update(task, advance=1, description=f"loss {value:.3f}")
            if state["step"] % 100 == 0:
                save()
    save()
    model.eval()
    losses = held_out_loss(model, held)
    write_model(out, model, tokenizer, documents, losses, state)
    print(json.dumps(losses))


if __name__ == "__main__":
    typer.run(main)
