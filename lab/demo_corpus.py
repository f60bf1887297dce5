"""What the bundled model is trained on (see ``train_demo_model.py``): stories, sums, functions."""

from __future__ import annotations

import ast
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BEGIN, USER, ASSISTANT, END, PAD = "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
# Plain prose first: a model this small writes better sentences from simpler books.
STORY_AUTHORS = (
    "Aesop", "Arthur Conan Doyle", "Beatrix Potter", "Edith Nesbit", "Frances Hodgson Burnett",
    "Hans Christian Andersen", "J. M. Barrie", "Kenneth Grahame", "L. Frank Baum", "Lewis Carroll",
    "Robert Louis Stevenson", "The Brothers Grimm",
)  # fmt: skip
HELD_OUT_BOOK = "The Wind in the Willows"
MIX = {"stories": 0.30, "story tasks": 0.27, "maths": 0.31, "python": 0.12}


class Documents:
    """Texts by kind; the held-out ones are never trained on."""

    def __init__(self) -> None:
        self.train: dict[str, list[str]] = {kind: [] for kind in MIX}
        self.held_out: dict[str, list[str]] = {kind: [] for kind in MIX}

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
