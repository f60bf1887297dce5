"""`token-recycling generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show, stdin
from token_recycling.errors import INTERRUPTED, TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.decoding.text import Prompt
    from token_recycling.drafting.accepted import Accepted
    from token_recycling.drafting.draft import DraftTree
    from token_recycling.recycler import TokenRecycling


@o.expanded(loading=(), sampling=())
def generate(
    loading: o.Loading,
    sampling: o.Sampling,
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt.")] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.")
    ] = None,
    max_tokens: o.MaxTokens = defaults.MAX_NEW_TOKENS,
    raw: o.Raw = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode without drafts; compare text and speed.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show on stderr what each step drafted, and why."),
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Answer a prompt. The text goes to stdout, statistics go to stderr.

    Input from a file or a pipe on stdin is put before the prompt.

    token-recycling "Tell me the story of the fox" -n 100
    """
    if explain and (compare or as_json):
        raise TokenRecyclingError("--explain cannot be combined with --compare or --json")
    question = _question(text, prompt)
    options = sampling.options(max_tokens)
    recycler = loading.open()
    if explain:
        options["on_draft"] = _explaining(recycler)
        if recycler.batch_invariant:
            show.note("batch-invariant: drafts change no bit of the logits, in any dtype")
    try:
        if compare:
            _compare(recycler, as_prompt(recycler, question, raw), options, as_json)
        else:
            _answer(recycler, as_prompt(recycler, question, raw), options, as_json)
    except (KeyboardInterrupt, OSError) as error:  # save what was learned so far
        loading.save(recycler)
        if isinstance(error, KeyboardInterrupt):
            show.note("\ninterrupted: the answer is incomplete")
            raise SystemExit(INTERRUPTED) from None
        raise
    loading.save(recycler)
    if not as_json:
        loading.note_toy()


def _question(text: str | None, prompt: str | None) -> str:
    if text is not None and prompt is not None:
        raise TokenRecyclingError("the prompt is given twice; use either -p or the argument")
    question = prompt if text is None else text
    question = stdin.joined(question)
    if not question.strip():
        raise TokenRecyclingError(
            'there is no prompt; write token-recycling "PROMPT" or token-recycling < FILE'
        )
    return question


def as_prompt(recycler: TokenRecycling, question: str, raw: bool) -> Prompt:
    """Return the question as a chat if the model has a chat template, unless ``raw``."""
    from token_recycling.decoding.text import as_conversation

    return as_conversation(recycler.tokenizer, [question], raw)


def _answer(
    recycler: TokenRecycling, prompt: Prompt, options: dict[str, Any], as_json: bool
) -> None:
    if as_json:
        answer = recycler.generate(prompt, **options)
        about = {
            "drafter": recycler.drafter.name,
            "drafts": recycler.session.described_size,
        }
        result = {**vars(answer), "stats": answer.stats.to_dict(), **about}
        print(json.dumps(result, ensure_ascii=False))
        return
    with progress.prefill_shown() as on_progress:
        show.legend()
        last = show.stream(recycler.stream(prompt, on_progress=on_progress, **options))
    show.ending(last, recycler.draft_size.why_plain(), options["max_new_tokens"])


def _explaining(recycler: TokenRecycling) -> Callable[..., None]:
    """Return an ``on_draft`` callback that shows on stderr what every step drafted."""
    from token_recycling.decoding.explain import drafted_nodes, lines

    def text(token: int) -> str:
        return repr(recycler.tokenizer.decode([token]))

    def explain(rows: Any, draft: DraftTree, accepted: Accepted) -> None:
        if nodes := drafted_nodes(recycler.drafter, rows, draft, accepted):
            sys.stdout.flush()
            show.note("\n" + "\n".join(lines(nodes, accepted.tokens(0), text)))
            why = recycler.draft_size.why_plain()
            if len(nodes) == 1 and why is not None:
                show.note(f"  {why}")

    return explain


def _compare(
    recycler: TokenRecycling, prompt: Prompt, options: dict[str, Any], as_json: bool
) -> None:
    from token_recycling.bench.compare import compare

    with progress.progress_shown("decoding in both ways") as on_progress:
        result = compare(recycler, prompt, options, on_progress=on_progress)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    print(result.text)
    show.note(result.table())
    show.plainly(result.stats, recycler.draft_size.why_plain())
