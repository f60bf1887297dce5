"""Faults to put into the adapters on purpose: each must turn the tests red."""

from __future__ import annotations


def apply_version(package: str, number: str | None) -> None:
    """Pretend that another version of a package is installed."""
    if number is None:
        return
    from token_recycling.integrations.engines import versions

    whole = versions.version
    versions.version = lambda name: number if name == package else whole(name)


def hide_the_package() -> None:
    """Make an environment without Token Recycling of this process."""
    import importlib.metadata as metadata
    import sys

    for name in [name for name in sys.modules if name.startswith("token_recycling")]:
        del sys.modules[name]
    sys.modules["token_recycling"] = None  # importing it fails
    whole = metadata.entry_points

    def entry_points(**selection):
        found = whole(**selection)
        if not selection:
            return found
        kept = (point for point in found if not point.value.startswith("token_recycling"))
        return metadata.EntryPoints(kept)

    metadata.entry_points = entry_points


def apply_vllm(name: str | None) -> None:
    """Break the step."""
    if name is None:
        return
    if name.startswith("v2 "):
        apply_vllm_v2(name.removeprefix("v2 "))
        return
    from token_recycling.integrations.vllm import accept, tree_attention

    if name == "stale processors":
        accept._after = lambda processor, emitted: processor
    elif name == "stale texts":
        accept._Draws._after = lambda self, rows: self._metadata
    elif name == "no commit":
        tree_attention.keep_paths = lambda runner, metadata, paths: None
    elif name == "no depth positions":
        whole = tree_attention.place

        def place(runner, proposer, metadata):
            before = runner.positions.clone()
            whole(runner, proposer, metadata)
            runner.positions.copy_(before)

        tree_attention.place = place
    elif name == "no mask":
        whole_mask = tree_attention.visible
        tree_attention.visible = lambda q, length, tree, window: whole_mask(q, length, None, window)
    else:
        raise ValueError(name)


def apply_vllm_v2(name: str) -> None:
    """Break a step in Model Runner V2."""
    import torch

    from token_recycling.integrations.vllm import device_trees, sampler

    whole, place = sampler.follow, device_trees.place

    def follow(states, branches, draft, tokens, choices, *others):
        firsts = others[2]
        if name == "accept all":  # as if every draft were right
            choices = choices.clone()
            choices[:-1] = tokens[1:]
            last = firsts[1:].long() - 1
            choices[last] = tokens[last].long()
        else:  # each token is the one drawn after the node behind
            choices = choices.roll(1)
        return whole(states, branches, draft, tokens, choices, *others)

    def placed(states, draft, starts, firsts, positions, paths, depths):
        before = positions.clone()
        place(states, draft, starts, firsts, positions, paths, depths)
        if name == "no depth positions":
            positions.copy_(before)
        else:  # every node sees all of its draft
            paths.copy_(torch.arange(draft.size).expand_as(paths))
            queries = (starts[1:] - starts[:-1]).clamp(max=draft.size)
            depths[: len(queries)] = queries[:, None]

    if name in ("accept all", "shifted draws"):
        sampler.follow = follow
    elif name == "no commit":
        device_trees.move = lambda *arguments: None
    else:
        assert name in ("no depth positions", "no mask")
        device_trees.place = placed


def apply_sglang(name: str) -> None:
    """Break the step of ``TOKEN_RECYCLING``; called in the scheduler's process."""
    import torch
    from sglang.srt.speculative import ngram_worker

    from token_recycling.integrations.sglang import drafting, worker

    if name.startswith("varied sizes"):
        if name.endswith("without resuming"):
            assert drafting.BatchDrafting._resume  # or the fault would be none
            drafting.BatchDrafting._resume = lambda *arguments: None
        vary_sizes(drafting)
        return
    if name == "no draws":
        worker.draw_on_cpus = lambda sampler: None
        return
    if name == "no commit":
        ngram_worker.move_accept_tokens_to_target_kvcache = lambda *arguments: None
        return
    whole = worker.NgramVerifyInput

    def broken(**given):
        if name == "no depth positions" and given.get("positions") is not None:
            n = given["draft_token_num"]
            rows = given["positions"].view(-1, n)
            given["positions"] = (rows[:, :1] + torch.arange(n)).flatten()
        elif name == "no mask" and given.get("custom_mask") is not None:
            n = given["draft_token_num"]
            rows = len(given["custom_mask"]) // (n * n)
            given["custom_mask"] = (
                torch.ones(n, n, dtype=torch.bool).tril().repeat(rows, 1, 1).flatten()
            )
        return whole(**given)

    worker.NgramVerifyInput = broken


def vary_sizes(drafting) -> None:
    """Choose sizes and pauses by turns, not by times; check the texts that the drafter has."""
    from itertools import count

    from token_recycling.drafting.size.auto import AutoSize

    steps, draft_of = count(), drafting.BatchDrafting.draft
    AutoSize.pays = property(lambda self: next(steps) // 3 % 3 > 0)
    AutoSize.choose = lambda self, draft: 1 + next(steps) * 7 % draft.size

    def draft_and_check(self, batch, *, captured, late):
        info, rows = batch.spec_info, len(batch.reqs)
        new = info.accept_tokens.view(rows, -1).tolist()
        newest = [new[row][:n] if late else [] for row, n in enumerate(info.accept_lens.tolist())]
        draft = draft_of(self, batch, captured=captured, late=late)
        if self.takes_part:
            context = self._requests._live.rows.context
            for row, request in enumerate(batch.reqs):
                said = [*request.origin_input_ids, *request.output_ids, *newest[row]][-20:]
                length = int(context.lengths[row])
                known = context.tokens[row, :length].tolist()[-20:]
                assert known == said[-len(known) :], "the drafter has another text"
        return draft

    drafting.BatchDrafting.draft = draft_and_check
