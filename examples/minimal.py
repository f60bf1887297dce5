"""Token Recycling in a hundred lines: greedy, one text, a tree of fixed shape.

python examples/minimal.py [--prompt TEXT] [--model MODEL] [--tree paper] [--k 8]

Without a model it is a toy of 3.4 M parameters. Models with sliding windows are not served: their
caches drop entries, which this commit would have to follow.

After every forward pass the k best candidates behind each token that was read are kept in a matrix.
The next draft is a tree that is filled from the matrix. One forward pass verifies all of its nodes,
since an attention mask lets each node see its ancestors only. The longest path that the model
agrees with is accepted, with one more token behind it. The text is that of ``model.generate``.

The library does the same with draft sizes that follow the machine, candidates for two and three
tokens, sampling, batches and kernels (docs/architecture.md).
"""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from token_recycling import BUNDLED_MODEL, AdjacencyMatrix, TreeTemplate


class Tree:
    """The shape of every draft of n nodes. Node 0 is the root: the last token of the text."""

    def __init__(self, template: TreeTemplate) -> None:
        self.parents = template.parents
        self.ranks = [0, *(path[-1] for path in template.paths)]
        self.depths = torch.tensor([0, *map(len, template.paths)])
        self.visible = torch.eye(len(self.parents), dtype=torch.bool)  # [n, n]: node sees node
        for node, parent in list(enumerate(self.parents))[1:]:
            self.visible[node] |= self.visible[parent]

    def fill(self, root: int, matrix: AdjacencyMatrix) -> Tensor:
        """Return the tokens of a draft, int64 [n]: each is a candidate behind its parent."""
        tokens = [root]
        for parent, rank in zip(self.parents[1:], self.ranks[1:]):
            candidate = int(matrix.candidates[tokens[parent], rank])
            tokens.append(max(candidate, 0))  # -1: the parent was never read; any token will do
        return torch.tensor(tokens)

    def accept(self, tokens: Tensor, choices: Tensor) -> list[int]:
        """Return the longest path of nodes of which each token is its parent's choice."""
        path = [0]
        for node, parent in list(enumerate(self.parents))[1:]:
            if parent == path[-1] and tokens[node] == choices[parent]:
                path.append(node)
        return path


def forward(
    model: Any, tokens: Tensor, cache: DynamicCache, depths: Tensor, visible: Tensor
) -> Any:
    """Return the logits [n, V] of ``tokens`` int64 [n] behind the cached ones."""
    length = cache.get_seq_length()
    seen = torch.cat([torch.ones(len(tokens), length, dtype=torch.bool), visible], dim=1)
    mask = torch.zeros(seen.shape, dtype=model.dtype)
    mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)
    new_name = "cache" in signature(model.forward).parameters  # since Transformers 5.24
    output = model(
        input_ids=tokens[None],
        attention_mask=mask[None, None],
        position_ids=(length + depths)[None],
        **{"cache" if new_name else "past_key_values": cache},
    )
    logits: Tensor = output.logits[0]
    return logits


def commit(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Keep the entries of the accepted nodes, which begin at slot ``length``."""
    kept = torch.cat([torch.arange(length), length + torch.tensor(path)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


@torch.inference_mode()
def generate(
    model: Any, prompt: list[int], most: int, matrix: AdjacencyMatrix, tree: Tree, ends: set[int]
) -> tuple[list[int], int]:
    """Return the tokens behind ``prompt``, up to one of ``ends``, and the number of forwards."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(prompt)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    logits = forward(model, ids, cache, torch.arange(len(ids)), causal)
    text, forwards = [int(logits[-1].argmax())], 1
    matrix.update(ids, logits.topk(matrix.k).indices)
    while len(text) < most and not ends.intersection(text):
        length = cache.get_seq_length()
        tokens = tree.fill(text[-1], matrix)
        logits = forward(model, tokens, cache, tree.depths, tree.visible)  # verify
        choices = logits.argmax(dim=-1)
        path = tree.accept(tokens, choices)
        text += choices[path].tolist()  # the accepted nodes but the root, and one more token
        matrix.update(tokens, logits.topk(matrix.k).indices)  # recycle
        commit(cache, length, path)
        forwards += 1
    end = next((n for n, token in enumerate(text) if token in ends), most)
    return text[: min(end + 1, most)], forwards


def main(
    prompt: str = "Once upon a time there was a king",
    model: str = str(BUNDLED_MODEL),
    tree: str = "paper",
    k: int = 8,
) -> None:
    """Print a text of at most 100 tokens, and how many forward passes it took."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    if any(layer.is_sliding for layer in DynamicCache(config=target.config).layers):
        sys.exit("this model has layers with sliding windows; use the library")
    tokenizer, ends = AutoTokenizer.from_pretrained(model), target.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    matrix, shape = AdjacencyMatrix(target.config.vocab_size, k), Tree(TreeTemplate.load(tree, k))
    text, forwards = generate(target, tokenizer(prompt).input_ids, 100, matrix, shape, ends)
    print(tokenizer.decode(text))
    print(f"{len(text)} tokens in {forwards} forward passes")


if __name__ == "__main__":
    typer.run(main)
