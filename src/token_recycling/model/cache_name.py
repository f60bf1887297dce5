"""How a model calls its cache: ``cache`` since Transformers 5.24, ``past_key_values`` before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput

OLD, NEW = "past_key_values", "cache"
# The name among the arguments and results of ``generate``
CACHE_NAME = NEW if NEW in {field.name for field in fields(GenerateDecoderOnlyOutput)} else OLD


def cache_name(parameters: Collection[str]) -> str:
    """Return the name among the ``parameters`` of a forward; a model's own code may be older."""
    return OLD if OLD in parameters else CACHE_NAME


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, by either name, or None."""
    cache = arguments.get(CACHE_NAME)
    return arguments.get(OLD) if cache is None else cache
