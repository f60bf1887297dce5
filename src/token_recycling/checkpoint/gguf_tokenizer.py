"""Tokenizers of GGUF files, kept in Transformers' format in the cache folder.

A GGUF file has only the vocabulary: Transformers builds a tokenizer from it, which takes up to ten
seconds. Once built, it is loaded in one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from skinny_kernels.errors import one_line
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import cache_folder, make_folder_atomically

READ = 2**26  # bytes: more than any header has
logger = logging.getLogger(__name__)


def kept_tokenizer(file: Path, build: Callable[[], Any]) -> Any:
    """Return the tokenizer of a GGUF file, from the cache folder if it is there.

    Args:
        file: the file.
        build: returns its tokenizer; what that returns is kept where the cache folder can be
            written to.
    """
    from transformers import AutoTokenizer

    folder = None
    with suppress(OSError, TokenRecyclingError):  # it cannot be read, or there is no cache folder
        folder = cache_folder() / "tokenizers" / _key(file)
    if folder is not None and folder.is_dir():
        try:
            kept = AutoTokenizer.from_pretrained(str(folder))
            kept.name_or_path = str(file.parent)
            return kept
        except Exception as error:  # whatever damaged files lead to
            logger.debug("a kept tokenizer is built anew: %s", one_line(error, 200))
    tokenizer = build()
    if folder is not None:
        with suppress(Exception):  # it is built again the next time
            make_folder_atomically(folder, tokenizer.save_pretrained)
    return tokenizer


def _key(file: Path) -> str:
    """Return a name for what Transformers builds from a file's header."""
    import transformers

    with file.open("rb") as stream:
        content = hashlib.sha256(stream.read(READ))
    content.update(transformers.__version__.encode())
    return content.hexdigest()
