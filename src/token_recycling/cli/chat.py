"""`token-recycling chat`: a conversation that keeps the matrix and the KV cache between turns."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError, printable

if TYPE_CHECKING:
    from token_recycling.decoding.answers import Chunk
    from token_recycling.recycler import TokenRecycling

COMMAND = re.compile(r"/\w*")
HELP = """/reset   start a new conversation; keep the matrix
/forget  start a new conversation; forget what was learnt from the last ones
/quit    end the chat, like Ctrl-D"""
ANSWER = 4  # at most 1/ANSWER of the context is reserved for the answer


@o.expanded(loading=(), sampling=())
def chat(
    loading: o.Loading,
    sampling: o.Sampling,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: o.MaxTokens = defaults.MAX_NEW_TOKENS,
) -> None:
    """Chat with a model, one line per turn.

    /help lists the commands; /quit or the end of input ends the chat. Ctrl-C stops an answer.
    """
    options = sampling.options(max_tokens)
    recycler = loading.open()
    if not getattr(recycler.tokenizer, "chat_template", None):
        raise TokenRecyclingError("this model has no chat template; use generate")
    talk = _Talk(recycler, system, options, cold=loading.cold)
    talk.check()
    loading.note_toy()
    show.legend()
    try:
        while (line := _typed()) is not None and line != "/quit":
            if line:
                talk.take(line)
    finally:
        loading.save(recycler)


class _Talk:
    """A conversation on the terminal."""

    def __init__(
        self, recycler: TokenRecycling, system: str | None, options: dict[str, Any], *, cold: bool
    ) -> None:
        from token_recycling.cli.conversation import Conversation

        self.recycler, self.options, self.cold = recycler, options, cold
        self.conversation = Conversation(recycler.tokenizer, system)

    def check(self) -> None:
        """Check options and system message before the first question.

        Raises:
            TokenRecyclingError: an option or the system message cannot be used.
        """
        self.recycler.stream(self.conversation.prompt("Hello"), **self.options)

    def take(self, line: str) -> None:
        """Execute a command, or answer ``line``."""
        if not COMMAND.fullmatch(line):
            self._answer(line)
        elif line == "/reset":
            self.conversation.clear()
            self.recycler.forget_context()
            show.note("the conversation is empty; the matrix is kept (/forget clears it)")
        elif line == "/forget":
            self.conversation.clear()
            self.recycler.reset()
            show.note("the conversation is empty; what was learnt from text is forgotten")
        else:
            if line != "/help":
                show.note(f"unknown command: {printable(line)}")
            show.note(HELP)

    def _answer(self, line: str) -> None:
        """Answer ``line`` and add question and answer, even if interrupted, to the conversation."""
        if self.cold:
            self.recycler.reset()
        answer: list[Chunk] = []

        def noting(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            for chunk in chunks:
                answer.append(chunk)
                yield chunk

        try:
            prompt = self._fitting(line)
            with progress.prefill_shown() as on_progress:
                chunks = self.recycler.stream(
                    prompt, keep_context=True, on_progress=on_progress, **self.options
                )
                last = show.stream(noting(chunks))
            why = self.recycler.draft_size.why_plain()
            show.ending(last, why, self.options["max_new_tokens"])
        except KeyboardInterrupt:
            show.note("\ninterrupted: the answer is incomplete")
        except TokenRecyclingError as error:
            show.note(f"error: {printable(error)}")
            return
        text = "".join(chunk.text for chunk in answer)
        self.conversation.answered(line, text, [chunk.token_id for chunk in answer])

    def _fitting(self, line: str) -> list[int]:
        """Return the prompt, without the oldest turns if the context is too short.

        Raises:
            TokenRecyclingError: ``line`` alone is too long.
        """
        limit = self.recycler.target.max_context
        if limit is None:
            return self.conversation.prompt(line)
        answer = min(self.options["max_new_tokens"], limit // ANSWER)
        left_out = self.conversation.shorten(line, limit - answer)
        if left_out:
            show.note(f"the context of {limit} tokens is full; oldest turns dropped: {left_out}")
        return self.conversation.prompt(line)


def _typed() -> str | None:
    """Read a turn from stdin; return None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            show.note("\n(/quit or Ctrl-D ends the chat)")
