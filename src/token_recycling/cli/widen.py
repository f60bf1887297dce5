"""`token-recycling widen`: pad a small model to the shape of a larger one."""

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
    """Pad a small Llama to the shape of a larger one.

    The result writes the same text at the larger model's cost: the added weights are zero or
    cancel out, so the logits stay the same up to rounding. It allows timing real text at a large
    model's shape without that model's weights.
    """
    from transformers.utils import logging

    from token_recycling.bench import widen as widening

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made = widening.widen(small, to, out, dtype=dtype)
    print(f"wrote {out}: {made.parameters:,} parameters, {made.bytes:,} bytes of {dtype}")
    print(f"differences from the shape of {to}: " + ("; ".join(made.differs) or "none"))
