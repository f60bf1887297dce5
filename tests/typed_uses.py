"""Right and wrong uses of the library, for mypy (`make lint`); pytest does not run them.

An error that mypy is told to ignore and does not find is an error itself, so that every wrong use
here must be found.
"""

from collections.abc import Iterator
from typing import Any

from token_recycling import CallOptions, Chunk, Generation, Options, TokenRecycling, enable


def right_uses(model: Any, recycler: TokenRecycling) -> None:
    """The types of a caller's results need no check."""
    one: Generation = recycler.generate("Once", max_new_tokens=20, temperature=0.8, top_p=0.9)
    of_ids: Generation = recycler.generate([1, 2, 3])
    chat: Generation = recycler.generate([{"role": "user", "content": "Hello"}], seed=1)
    several: list[Generation] = recycler.generate(["Once", "Twice"], stop="\n")
    of_many_ids: list[Generation] = recycler.generate([[1, 2], [3]])
    chunks: Iterator[Chunk] = recycler.stream("Once", keep_context=True)
    print(one, of_ids, chat, several, of_many_ids, chunks, Options(), CallOptions())
    TokenRecycling(model, nodes=8, drafter="adaptive")
    with enable(model, k=8, strict=True) as enabled:
        print(enabled.stats.mat)


def wrong_uses(model: Any, recycler: TokenRecycling) -> None:
    """Each of these is found."""
    recycler.generate("Once", max_new_tokns=20)  # type: ignore[call-overload]
    recycler.generate("Once", max_tokens=20)  # type: ignore[call-overload]
    recycler.generate("Once", temperature="hot")  # type: ignore[call-overload]
    recycler.generate(5)  # type: ignore[call-overload]
    recycler.generate("Once")[0]  # type: ignore[index]
    recycler.generate(["Once"]).text  # type: ignore[attr-defined]  # noqa: B018
    recycler.stream("Once", temprature=1.0)  # type: ignore[call-arg]
    TokenRecycling(model, node=8)  # type: ignore[call-arg]
    TokenRecycling(model, nodes="8")  # type: ignore[arg-type]
    enable(model, graph="yes")  # type: ignore[arg-type]
