"""Memory of keys and values in captured steps, by the shape of a model and the context.

    python lab/graph_memory.py        prints the table of docs/graph.md

Nothing is allocated: tensors are on the device "meta". While an answer is decoded by a graph, its
keys and values are in the ordinary cache, which read the prompt, and in the graph's.
"""

from __future__ import annotations

import torch

from token_recycling.graph.decoder import slots_for
from widen import SHAPES

MODELS = ("llama-1b", "llama-8b", "llama-70b")
CONTEXTS = (2048, 32_768, 131_072)
LARGEST = 64  # tokens of the largest draft of a graph
GIB = 2**30
SHAPES.setdefault("llama-70b", {"num_hidden_layers": 80, "num_key_value_heads": 8, "head_dim": 128})


def gibibytes(shape: dict[str, int], slots: int) -> float:
    """Return the GiB of keys and values of one row in bfloat16."""
    heads, size = shape["num_key_value_heads"], shape["head_dim"]
    one = torch.empty(heads, slots, size, dtype=torch.bfloat16, device="meta")
    return 2 * shape["num_hidden_layers"] * one.numel() * one.element_size() / GIB


def main() -> None:
    """Print the table."""
    titles = [f"{context:,} tokens" for context in CONTEXTS]
    print(f"| GiB, ordinary + graph's | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|")
    for name in MODELS:
        shape = SHAPES[name]
        cells = []
        for context in CONTEXTS:
            slots = slots_for(context, LARGEST)
            cells.append(f"{gibibytes(shape, context):.2f} + {gibibytes(shape, slots):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
