"""Draw the picture of the README: python lab/draw_readme.py

It has a ground of its own that is white in light mode and GitHub's dark in dark mode, so that its
text stays readable even where the page and the reader's system disagree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# what is written in light mode, and what stands for it in dark mode
PAGE = ("#ffffff", "#0d1117")
INK = ("#1f2328", "#e6edf3")
MUTED = ("#59636e", "#9aa4b0")
EDGE = ("#d1d9e0", "#3d444d")
CARD = ("#f6f8fa", "#151b23")
BLUE = ("#0969da", "#58a6ff")
BLUE_GROUND = ("#ddf4ff", "#12305a")
GREEN = ("#1a7f37", "#3fb950")
GREEN_GROUND = ("#dafbe1", "#12361f")
ORANGE = ("#bc4c00", "#f0883e")
ORANGE_GROUND = ("#fff1e5", "#3d2410")

SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"


# The idea


class Drawing:
    """An SVG under construction; colours are named, and their style sheet is made at the end."""

    COLOURS = {
        "page": PAGE,
        "ink": INK,
        "muted": MUTED,
        "edge": EDGE,
        "card": CARD,
        "blue": BLUE,
        "blue-ground": BLUE_GROUND,
        "green": GREEN,
        "green-ground": GREEN_GROUND,
        "orange": ORANGE,
        "orange-ground": ORANGE_GROUND,
    }

    def __init__(self, width: int, height: int, title: str, about: str) -> None:
        self.width, self.height = width, height
        self.title, self.about = title, about
        self.parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "card",
        stroke: str = "edge",
        radius: float = 6,
        extra: str = "",
    ) -> None:
        """A box with round corners."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'class="f-{fill} s-{stroke}" {extra}/>'
        )

    def path(self, d: str, stroke: str = "muted", width: float = 1.5, extra: str = "") -> None:
        """A line."""
        self.parts.append(
            f'<path d="{d}" class="s-{stroke}" fill="none" stroke-width="{width:g}" {extra}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "ink",
        size: float = 13,
        mono: bool = False,
        bold: bool = False,
        anchor: str = "start",
        extra: str = "",
    ) -> None:
        """One line of text, its baseline at y; `tokens` stand in back quotes."""
        tokens = re.sub(
            "`(.*?)`", r'<tspan class="mono bold">\1</tspan>', escape(words, quote=False)
        )
        kind = f"f-{colour}" + (" mono" if mono else "") + (" bold" if bold else "")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size:g}" '
            f'text-anchor="{anchor}" {extra}>{tokens}</text>'
        )

    def lines(self, x: float, y: float, rows: Sequence[str], **style: Any) -> None:
        """Several lines of text."""
        for number, row in enumerate(rows):
            self.text(x, y + 18 * number, row, **style)

    def arrow(self, x: float, y: float, towards: str, colour: str) -> None:
        """The head of an arrow with its tip at (x, y)."""
        dx, dy = {"right": (-8, 5), "up": (5, 8)}[towards]
        ends = (
            f"{x + dx},{y - dy} {x + dx},{y + dy}"
            if towards == "right"
            else f"{x - dx},{y + dy} {x + dx},{y + dy}"
        )
        self.parts.append(f'<polygon points="{x:g},{y:g} {ends}" class="f-{colour}"/>')

    def svg(self) -> str:
        """The finished picture."""

        def rules(mode: int) -> str:
            return "".join(
                f".f-{name}{{fill:{colour[mode]}}}.s-{name}{{stroke:{colour[mode]}}}"
                for name, colour in self.COLOURS.items()
            )

        style = (
            f"text{{font-family:{SANS}}}.mono{{font-family:{MONO}}}.bold{{font-weight:600}}"
            f".s-none{{stroke:none}}.f-none{{fill:none}}{rules(0)}"
            f"@media (prefers-color-scheme: dark){{{rules(1)}}}"
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="t d">\n'
            f'<title id="t">{escape(self.title)}</title>\n'
            f'<desc id="d">{escape(self.about)}</desc>\n'
            f"<style>{style}</style>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="8" class="f-page"/>\n'
            f"{body}\n</svg>\n"
        )


def pill_width(word: str) -> float:
    """How wide the box of a token is."""
    return 7.9 * len(word) + 14


def pill(d: Drawing, x: float, y: float, word: str, look: str = "plain") -> None:
    """A token in its box, centred at (x, y)."""
    fill, stroke, ink, extra = {
        "plain": ("page", "edge", "ink", ""),
        "root": ("blue-ground", "blue", "ink", ""),
        "yes": ("green-ground", "green", "ink", 'stroke-width="2"'),
        "no": ("page", "muted", "muted", 'stroke-dasharray="3 2.5"'),
        "bonus": ("orange-ground", "orange", "ink", 'stroke-width="2"'),
    }[look]
    width = pill_width(word)
    d.rect(x - width / 2, y - 12, width, 24, fill, stroke, 12, extra)
    d.text(x, y + 4.5, word, ink, mono=True, bold=look in ("yes", "bonus"), anchor="middle")


# the tree of the example: name -> (word, parent, place across, place down)
TREE = {
    "the": ("the", "", 100, 0),
    "door": ("door", "the", 52, 1),
    "fire": ("fire", "the", 148, 1),
    "was": ("was", "door", 26, 2),
    "d.": (".", "door", 71, 2),
    "and": ("and", "fire", 126, 2),
    "f.": (".", "fire", 171, 2),
    "waited": ("waited", "and", 50, 3),
    "then": ("then", "and", 111, 3),
}
ACCEPTED = ("fire", "and")


def tree(d: Drawing, x: float, y: float, verified: bool) -> None:
    """The draft tree at (x, y); once verified, with what was accepted and the bonus token."""
    place = {name: (x + across, y + 47 * down) for name, (_, _, across, down) in TREE.items()}
    bonus = (x + 164, y + 47 * 3)

    def edge(
        start: tuple[float, float], end: tuple[float, float], colour: str, wide: float
    ) -> None:
        (x0, y0), (x1, y1) = (start[0], start[1] + 12), (end[0], end[1] - 12)
        middle = (y0 + y1) / 2
        d.path(f"M{x0:g} {y0:g}C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}", colour, wide)

    for name, (_, parent, _, _) in TREE.items():
        if parent:
            taken = verified and name in ACCEPTED
            edge(
                place[parent],
                place[name],
                "green" if taken else "edge" if verified else "muted",
                2.5 if taken else 1.5,
            )
    if verified:
        edge(place["and"], bonus, "orange", 2.5)
    for name, (word, parent, _, _) in TREE.items():
        rest = ("yes" if name in ACCEPTED else "no") if verified else "plain"
        pill(d, *place[name], word, "root" if not parent else rest)
    if verified:
        pill(d, *bonus, "told", "bonus")


def idea() -> str:
    """Four steps: what a forward ranks, the row it becomes, the tree, and its verification."""
    d = Drawing(
        880,
        452,
        "How Token Recycling decodes",
        "Every forward ranks the whole vocabulary. The top candidates become the row of the token "
        "in an adjacency matrix. Rows grow a draft tree from the last token. One forward verifies "
        "the tree; the longest accepted path and one bonus token are kept, and the candidates of "
        "all nodes are written back.",
    )
    top, bottom = 66, 366
    cards = ((8, 186), (218, 190), (432, 206), (662, 210))
    titles = (
        ("Every forward ranks", "the whole vocabulary"),
        ("Its top-k becomes", "the row of its token"),
        ("Rows grow a draft tree", "from the last token"),
        ("One forward verifies", "the whole tree"),
    )
    for number, ((x, width), title) in enumerate(zip(cards, titles), 1):
        d.parts.append(f'<circle cx="{x + 13}" cy="30" r="13" class="f-blue"/>')
        d.text(x + 13, 35, str(number), "page", 14, bold=True, anchor="middle")
        d.lines(x + 34, 26, title, bold=True, size=14)
        d.rect(x, top, width, bottom - top, radius=8)
    for (x, width), (after, _) in pairwise(cards):
        d.path(f"M{x + width + 4:g} 200H{after - 10:g}", "blue", 2.5)
        d.arrow(after - 3, 200, "right", "blue")

    x = cards[0][0] + 12
    d.text(x, top + 28, "The cat lay by", mono=True)
    pill(d, x + 139, top + 24, "the", "root")
    d.text(x, top + 58, "What may come next:", "muted")
    for row, (word, length) in enumerate((("door", 52), ("fire", 40), ("river", 22), ("wall", 11))):
        y = top + 90 + 29 * row
        d.text(x, y, word, "ink", mono=True, bold=row == 0)
        colour = "green" if row == 0 else "muted"
        d.parts.append(
            f'<rect x="{x + 50}" y="{y - 10}" width="{length}" height="12" rx="2" '
            f'class="f-{colour}"/>'
        )
    d.text(x + 50, top + 204, "…", "muted")
    d.text(x + 116, top + 90, "kept", "green", bold=True)
    d.path(f"M{x + 107} {top + 106}h4v100h-4", "muted")
    d.lines(x + 116, top + 152, ("thrown", "away"), colour="muted")
    d.lines(x, top + 246, ("Plain decoding keeps one", "token and throws the rest", "away."))

    x = cards[1][0] + 12
    d.text(x, top + 28, "token", "muted")
    d.text(x + 58, top + 28, "most likely next", "muted")
    rows = (
        ("and", ("waited", "then", "…")),
        ("door", ("was", ".", "…")),
        ("fire", ("and", ".", "…")),
        ("the", ("door", "fire", "…")),
        ("was", ("a", "not", "…")),
    )
    for row, (token, found) in enumerate(rows):
        y = top + 44 + 34 * row
        new = token == "the"
        d.rect(x - 4, y, 174, 26, "blue-ground" if new else "page", "blue" if new else "edge", 4)
        d.path(f"M{x + 47} {y}v26", "blue" if new else "edge", 1)
        d.text(x + 3, y + 17.5, token, mono=True, bold=True)
        for column, word in enumerate(found):
            d.text(x + 55 + (0, 55, 100)[column], y + 17.5, word, mono=True)
    d.lines(
        x,
        top + 246,
        (
            "The adjacency matrix: k = 12",
            "ids a token, a few MB in all.",
            "No training, no draft model.",
        ),
    )

    x = cards[2][0]
    d.text(x + 12, top + 28, "The old king sat by the", mono=True)
    tree(d, x + 3, top + 60, verified=False)
    d.lines(
        x + 12,
        top + 246,
        (
            "The row of `the`, then those of",
            "`door` and `fire`, then those of",
            "their candidates, and so on.",
        ),
    )

    x = cards[3][0]
    d.text(x + 12, top + 28, "The old king sat by the", mono=True)
    tree(d, x + 5, top + 60, verified=True)
    d.lines(x + 12, top + 246, ("`fire and` is accepted, `told`", "is the model's own choice:"))
    d.text(x + 12, top + 282, "3 tokens from one forward.", bold=True)

    back, last = cards[1][0] + 95, cards[3][0] + 105
    d.path(
        f"M{last} {bottom + 4}v24q0 10 -10 10H{back + 10}q-10 0 -10 -10V{bottom + 12}", "blue", 2.5
    )
    d.arrow(back, bottom + 4, "up", "blue")
    d.text(
        (back + last) / 2,
        bottom + 62,
        "The top-k of every verified node, rejected ones too, is written to the row of its token.",
        anchor="middle",
    )
    return d.svg()


# The speed

# name in the results: (name in the legend, colours, marker)
DECODERS = {
    "auto": ("auto, the default", ("#1a7f37", "#3fb950"), "o"),
    "adaptive:nodes=8": ("8 nodes", ("#0969da", "#58a6ff"), "D"),
    "prompt-lookup": ("prompt lookup in our loop", ("#bf5700", "#f0883e"), "s"),
    "none": ("our loop without drafts", ("#cf226e", "#ff7bac"), "X"),
}
KINDS = {
    "math_reasoning": "GSM8K (Spec-Bench)",
    "summarization": "summary",
    "qa": "QA",
    "rag": "RAG",
    "math": "maths",
    "code": "MBPP",
    "gsm8k": "GSM8K",
    "stem": "STEM",
}
if __name__ == "__main__":
    (ROOT / "docs" / "images" / "idea.svg").write_text(idea(), "utf-8")
