"""``custom_generate`` of this repository: Token Recycling, from the package of that name."""

from token_recycling.integrations.transformers import generate

__all__ = ["generate"]
