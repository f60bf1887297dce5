"""A target without a network, and a drafter with scripted right and wrong guesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from token_recycling.drafting.base import Drafter, DrafterState
from token_recycling.drafting.templates import TreeShape, TreeTemplate

VOCABULARY = 12


def next_logits(context):
    """Return pseudo-random logits that depend only on the last three tokens."""
    rng = torch.Generator().manual_seed(hash(tuple(context[-3:])) % (2**31))
    return torch.randn(VOCABULARY, generator=rng)


class ToyTarget:
    """Target that computes the logits of every node from its path alone."""

    device = torch.device("cpu")
    vocab_size = VOCABULARY
    max_context = None
    is_warm = True
    inference_context = staticmethod(torch.inference_mode)

    def __init__(self, logits=next_logits):
        self.logits = logits
        self.forwards = 0

    def prefill(self, prompts, *, prompt_mask=None, learn_prompt=None, **options):
        self.rows = [list(prompt) for prompt in prompts]
        if learn_prompt is not None:
            for row, prompt in enumerate(prompts):
                tokens = torch.zeros((len(prompts), len(prompt)), dtype=torch.long)
                tokens[row] = torch.tensor(prompt)
                logits = torch.zeros(len(prompts), len(prompt), VOCABULARY)
                logits[row] = torch.stack(
                    [self.logits(prompt[: i + 1]) for i in range(len(prompt))]
                )
                valid = torch.zeros_like(tokens, dtype=torch.bool)
                asked = torch.ones_like(valid) if prompt_mask is None else prompt_mask(tokens)
                valid[row] = False if asked is None else asked[row]
                learn_prompt(tokens, logits, valid)
        return torch.stack([self.logits(prompt) for prompt in prompts])

    def deepest(self):
        return None

    def verify(self, draft):
        self.forwards += 1
        self.draft = draft
        batch, n = draft.tokens.shape
        result = torch.zeros(batch, n, VOCABULARY)
        for row in range(batch):
            for node in range(n):
                path = [i for i in range(n) if draft.ancestors[row, node, i]]
                path.sort(key=lambda i: int(draft.depths[row, i]))
                tokens = draft.tokens[row, path].tolist()
                result[row, node] = self.logits(self.rows[row] + tokens)
        return result

    def commit(self, path, counts):
        for row, count in enumerate(counts):
            self.rows[row] += self.draft.tokens[row, path[row, :count]].tolist()

    def reset(self):
        self.rows = []


@dataclass
class Lengths(DrafterState):
    """Prompt length of each row, int64 [B]."""

    prompts: torch.Tensor


class ScriptedDrafter(Drafter[Lengths]):
    """Proposes the target's own greedy tokens, or wrong ones, ``depth`` tokens ahead."""

    name = "scripted"

    def __init__(self, target, depth, right):
        """Draft the i-th new token correctly if ``right(i)``."""
        self.target, self.depth, self.right = target, depth, right
        self.shape = TreeShape(TreeTemplate.chain(depth), "cpu")

    def new_state(self, batch, capacity=None):
        return Lengths(torch.zeros(batch, dtype=torch.long))

    def load(self, state, texts):
        state.prompts = torch.tensor([len(text) for text in texts])

    def propose(self, state, roots, size=None):
        chains = []
        for row, root in enumerate(roots.tolist()):
            context, chain = [*self.target.rows[row], root], [root]
            for _ in range(self.depth):
                token = int(self.target.logits(context).argmax())
                if not self.right(len(context) - int(state.prompts[row])):
                    token = (token + 1) % VOCABULARY
                context.append(token)
                chain.append(token)
            chains.append(chain)
        tokens = torch.tensor(chains)
        draft = self.shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
        return draft.first(size)


def plain_greedy(prompt, n, logits=next_logits):
    context = list(prompt)
    for _ in range(n):
        context.append(int(logits(context).argmax()))
    return context[len(prompt) :]
