"""The command line: one file per verb; PyTorch is imported only when a verb needs a model."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from token_recycling import __version__
from token_recycling.cli import (
    bench,
    chat,
    check,
    demo,
    generate,
    matrix,
    replay,
    tree,
    tune,
    widen,
)
from token_recycling.errors import TokenRecyclingError

app = typer.Typer(
    name="token-recycling",
    help="Decode a language model several tokens at a time, without a change in any token.\n\n"
    'token-recycling "Tell me a story"   is short for   token-recycling generate "…"',
    add_completion=False,
    rich_markup_mode=None,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("replay")(replay.replay)
app.command("tune")(tune.tune)
app.command("widen")(widen.widen)
app.add_typer(tree.app, name="tree")
app.add_typer(matrix.app, name="matrix")
VERBS = {
    "bench",
    "chat",
    "check",
    "demo",
    "generate",
    "matrix",
    "replay",
    "tree",
    "tune",
    "widen",
}
BAD_INPUT = 2

# Typer has carried its own copy of click since 0.20; the class is found by way of a public one.
UsageProblem: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"token-recycling {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Hold the options that stand before a verb."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad input gives one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # a terminal of another alphabet shows a ? instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not argv:
        argv = ["--help"]
    elif argv[0] not in VERBS | {"--help", "--version"}:
        argv = ["generate", *argv]
    try:
        code = app(argv, standalone_mode=False)
    except (TokenRecyclingError, UsageProblem) as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except OSError as error:  # stdout is full, for one
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(code if isinstance(code, int) else 0)
