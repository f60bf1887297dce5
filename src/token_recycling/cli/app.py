"""Command-line app: the subcommands, standard streams, error messages and mistyped subcommands."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated

import typer

from token_recycling.cli import (
    bench,
    chat,
    check,
    demo,
    fetch_model,
    generate,
    matrix,
    serve,
    tree,
)
from token_recycling.cli.stdin import piped
from token_recycling.errors import BAD_INPUT, INTERRUPTED, TokenRecyclingError, printable
from token_recycling.version import __version__

app = typer.Typer(
    name="token-recycling",
    help="Generate several tokens per forward pass of a language model; the text is unchanged.\n\n"
    'token-recycling "Tell me a story"   is short for   token-recycling generate "…"',
    rich_markup_mode=None,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("fetch-model")(fetch_model.fetch_model)
app.command("serve")(serve.serve)
app.add_typer(bench.app, name="bench")
app.add_typer(tree.app, name="tree")
app.add_typer(matrix.app, name="matrix")
SUBCOMMANDS = {str(command.name) for command in app.registered_commands}
SUBCOMMANDS |= {str(group.name) for group in app.registered_groups}
# Options before any subcommand.
OPTIONS = {"--help", "--version", "--install-completion", "--show-completion"}
# Subcommands of similar programs; unlikely to be meant as a prompt.
FOREIGN = re.compile(
    "complete|completion|config|help|info|install|list|ls|models|ps|pull|run|start|"
    "stop|test|train|version"
)
# Variables of the scripts by which Typer completes.
COMPLETE, WORDS = "_TOKEN_RECYCLING_COMPLETE", ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
PATH = re.compile(r"\S*[/\\_]\S*|\S+\.[a-z]\w{1,11}")
NEAR = 0.75  # difflib similarity ratio
BROKEN_PIPE = 141  # 128 + SIGPIPE, as in a shell

# Typer bundles its own copy of click since 0.20; find the class through a public subclass.
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
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Accept options before the subcommand."""


def run(argv: list[str] | None = None) -> None:
    """Run the command line; bad input prints one line on stderr and exits with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TQDM_DISABLE", "1")  # Transformers' bars would mix with our own
    writable = _open_streams()
    warnings.formatwarning = _one_line  # type: ignore[assignment]
    try:
        if not writable:
            raise TokenRecyclingError("stdout is closed; the output cannot be printed")
        if COMPLETE in os.environ:
            _complete_generate()
        if not argv:
            argv = ["generate"] if piped() else ["--help"]
        elif argv[0].partition("=")[0] not in SUBCOMMANDS | OPTIONS:
            _refuse_mistyped(argv[0])
            _refuse_late_subcommand(argv)
            argv = ["generate", *argv]
        try:
            code = app(argv, prog_name=app.info.name, standalone_mode=False)
        except SystemExit:
            if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # Typer's, after a broken pipe
                raise SystemExit(_reader_gone()) from None
            raise
        sys.stdout.flush()
        if code == INTERRUPTED:  # what Typer makes of an interrupt
            raise KeyboardInterrupt
    except (TokenRecyclingError, UsageProblem) as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message.startswith("Got unexpected extra argument"):
            message += "; put a prompt of several words in quotes"
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except (KeyboardInterrupt, typer.Abort) as error:
        # Older versions of Typer make an Abort of an interrupt.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        raise SystemExit(_reader_gone()) from None
    except OSError as error:
        # Without a name it is stdout, on a full disk for example.
        what = error if error.filename else f"cannot write the output: {error.strerror}"
        print(f"error: {what}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _complete_generate() -> None:
    """Let a shell complete the options of ``generate`` behind a prompt, where no subcommand is."""
    for name in WORDS:  # what has been typed, by shell
        words = re.split(r"(\s+)", os.environ.get(name, ""))
        if len(words) > 3 and words[2] not in SUBCOMMANDS | OPTIONS:
            os.environ[name] = "".join([*words[:2], "generate", words[1], *words[2:]])
            if "COMP_CWORD" in os.environ:
                os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) + 1)


def _reader_gone() -> int:
    """Redirect stdout's remaining buffer to the null device; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return BROKEN_PIPE


def _open_streams() -> bool:
    """Open missing standard streams on the null device; return False if stdout was missing.

    Otherwise the next file opened would take over a standard file descriptor.
    """
    writable = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    # Output that the terminal cannot encode becomes ?. Undecodable input is rejected later.
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "replace"),
        (sys.stderr, "replace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    return writable


def _one_line(message: Warning | str, *others: object) -> str:
    """Format a warning as one line, without the source location."""
    return f"warning: {printable(' '.join(str(message).split()))}\n"


def _refuse_late_subcommand(argv: list[str]) -> None:
    """Reject a subcommand after options: it would be taken as the prompt.

    Raises:
        TokenRecyclingError: there is one.
    """
    for before, word in pairwise(argv):
        if word in SUBCOMMANDS and not before.startswith("-"):
            raise TokenRecyclingError(
                f"the command {word} must come before all options; to use it as a prompt: -p {word}"
            )


def _refuse_mistyped(word: str) -> None:
    """Reject what is more likely a mistyped subcommand or a file; on a terminal, ask.

    That is a single word like a subcommand of ours or of similar programs, or a path. Any other
    word is a prompt.

    Raises:
        TokenRecyclingError: ``word`` is no prompt.
        typer.Abort: it was asked, and is none.
    """
    near = get_close_matches(word.lower(), sorted(SUBCOMMANDS), n=1, cutoff=NEAR)
    near = near if WORD.fullmatch(word) else []
    if not (near or FOREIGN.fullmatch(word.lower()) or PATH.fullmatch(word)):
        return
    meant = (
        f"did you mean {near[0]}?"
        if near
        else f"the commands are {', '.join(sorted(SUBCOMMANDS))}."
    )
    refusal = f"no such command: {word}; {meant}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(f"{refusal} Use it as a prompt?", abort=True, err=True)
        return
    raise TokenRecyclingError(f"{refusal} To use it as a prompt: -p {word}")
