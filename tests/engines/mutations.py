"""Faults to put into the adapters on purpose: each must turn the tests red."""

from __future__ import annotations


def apply_vllm(name: str | None) -> None:
    """Break the step of ``mode=tree``."""
    if name is None:
        return
    from token_recycling.integrations.vllm import tree_attention, tree_step

    if name == "no commit":
        tree_step._move = lambda runner, paths: None
    elif name == "no depth positions":
        whole = tree_step.place

        def place(runner, proposer, metadata):
            before = runner.positions.clone()
            whole(runner, proposer, metadata)
            runner.positions.copy_(before)

        tree_step.place = place
    elif name == "no mask":
        whole_mask = tree_attention.visible
        tree_attention.visible = lambda q, length, tree, window: whole_mask(q, length, None, window)
    else:
        raise ValueError(name)
