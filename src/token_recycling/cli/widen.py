"""`token-recycling widen`: a small model at the cost of a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def widen(
    small: Annotated[str, typer.Argument(help='Folder of a plain Llama, or "bundled".')],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="smollm2-135m, qwen2.5-0.5b, llama-1b, llama-7b or a config.json."
        ),
    ],
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16.")] = "float32",
) -> None:
    """Write a small Llama in the shape of a larger one: the same text at the larger one's cost.

    What is added is zero or cancels out, so that the logits stay the same up to rounding. With
    it, real text can be timed at a real shape without the real model's weights.
    """
    from transformers.utils import logging

    from token_recycling.bench import widen as widening

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made = widening.widen(small, to, out, dtype=dtype)
    print(f"wrote {out}: {made.parameters:,} parameters, {made.bytes:,} bytes of {dtype}")
    print(f"the shape of {to}: " + ("; ".join(made.differs) or "nothing differs"))
