"""Drafts for an engine's requests on the device are those of the host, token by token.

A service is simulated: requests come and go, share slots, are preempted and resumed, and their
prompts come in chunks. The kernels run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from token_recycling import AdjacencyMatrix
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.integrations.engines.requests import RequestDrafter
from token_recycling.integrations.engines.step_logits import StepLogits
from token_recycling.util.tokens import padded

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from skinny_kernels.gpu.cache_kernel import addresses, move
from token_recycling.drafting.kernels.device import learn, propose, requests
from token_recycling.integrations.vllm import device_requests
from token_recycling.integrations.vllm.device_requests import DeviceRequests

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
V, SLOTS, DRAFTED, LONGEST, CHUNK = 40, 4, 3, 64, 12
NODES = 3  # of the tree that the chain is taken from: the interpreter needs time for each


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch):
    """As few lanes as nodes, which the interpreter computes in less time than 64."""
    for module in (propose, learn, requests):
        monkeypatch.setattr(module, "LEAST_NODES", 2)


def logits_after(text):
    """A model whose next token mostly follows from the last two."""
    rng = np.random.default_rng([*text[-2:], 7])
    logits = rng.normal(size=V) * 2
    logits[rng.integers(V)] += np.random.default_rng(len(text) * 31 + text[0]).choice([3.0, 0.5])
    return logits.astype(np.float32)


@dataclass
class Request:
    """A request of the service."""

    text: list[int]
    end: int  # tokens of the whole text
    slot: int = -1
    read: int = 0  # tokens of the text that the model has read
    began: int = 0  # tokens that it had when it got its slot
    draft: list[int] = field(default_factory=list)  # to be verified; -1: none


class Service:
    """An engine that keeps texts on the device, and a drafter on the host beside ours."""

    def __init__(self, seed, count):
        self.rng = random.Random(seed)
        self.waiting = [self._new() for _ in range(count)]
        self.running: list[Request] = []
        self.free = list(range(SLOTS))
        self.context = torch.zeros((SLOTS, LONGEST), dtype=torch.int32, device=DEVICE)
        self.totals, self.prompts = (
            torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        self.roots = torch.zeros(SLOTS, dtype=torch.long, device=DEVICE)
        on_host, on_device = (
            AdaptiveDrafter(AdjacencyMatrix(V, 4), NODES, pairs=31, triples=67, chain=5)
            for _ in range(2)
        )
        self.host = RequestDrafter(on_host, SLOTS, DRAFTED + 1, context=2 * LONGEST, chain=True)
        self.device = DeviceRequests(on_device, self.context, DRAFTED + 1, chains=True)
        self.seen: dict[int, int] = {}  # tokens by slot that the host has seen
        self.drafted = self.accepted = self.preempted = self.paused = 0

    def _new(self):
        text = [self.rng.randrange(V) for _ in range(self.rng.choice([1, 2, 3]))]
        for _ in range(self.rng.randrange(26)):
            text.append(int(logits_after(text).argmax()))
        return Request(text, len(text) + self.rng.randint(1, 10))

    def _admit(self):
        while self.waiting and self.free:
            request = self.waiting.pop(0)
            request.slot = self.free.pop(self.rng.randrange(len(self.free)))
            request.read, request.began, request.draft = 0, len(request.text), []
            self.context[request.slot, : len(request.text)] = torch.tensor(request.text)
            self.totals[request.slot] = self.prompts[request.slot] = len(request.text)
            self.running.append(request)

    def _leave(self, request):
        self.running.remove(request)
        self.free.append(request.slot)

    def step(self):
        """Run the model once for some of the requests; draft with both, and compare."""
        if len(self.running) > 1 and self.rng.random() < 0.06:
            request = self.rng.choice(self.running)
            self._leave(request)
            self.waiting.insert(self.rng.randrange(len(self.waiting) + 1), request)
            self.preempted += 1
        self._admit()
        batch = [one for one in self.running if self.rng.random() < 0.9] or self.running[:1]
        self.rng.shuffle(batch)
        verified, logits, counts, emitted = [], [], [], []
        for request in batch:
            left = len(request.text) - request.read
            middle = left > CHUNK and request.read + CHUNK < len(request.text)
            draft = [] if left > 1 or middle else request.draft
            if draft and self.rng.random() < 0.2:  # no room for all of it in this step
                draft = draft[: self.rng.randrange(len(draft))]
            request.read = request.read + CHUNK if middle else len(request.text)
            tokens = [max(token, 0) for token in draft]
            nodes = [logits_after([*request.text, *tokens[:n]]) for n in range(len(draft) + 1)]
            new = [] if middle else [int(nodes[0].argmax())]
            for token, after in zip(draft, nodes[1:]):
                if middle or token < 0 or token != new[-1]:
                    break
                new.append(int(after.argmax()))
            self.drafted += len(draft) > 0
            self.accepted += max(len(new) - 1, 0)
            verified += [request.text[-1], *tokens]
            logits += nodes
            counts.append(len(nodes))
            emitted.append(new)
        logits = torch.from_numpy(np.stack(logits))
        self._check_acceptance(batch, verified, logits, counts, emitted)
        for request, new in zip(batch, emitted):
            if new:
                request.read += len(new) - 1
                at = len(request.text)
                self.context[request.slot, at : at + len(new)] = torch.tensor(new)
                self.totals[request.slot] = at + len(new)
                self.roots[request.slot] = new[-1]
        if self.rng.random() < 0.1:  # a step after which nothing is drafted
            self.paused += 1
            self.device.forget()
            self.seen.clear()
            for request in batch:
                request.draft = []
        else:
            self._draft(batch, logits, counts, emitted)
        for request, new in zip(batch, emitted):
            request.text += new
            if new and (len(request.text) >= request.end or self.rng.random() < 0.02):
                self._leave(request)

    def _check_acceptance(self, batch, verified, logits, counts, emitted):
        firsts = self._firsts(counts)
        states = torch.tensor([request.slot for request in batch], device=DEVICE)
        positions = torch.full((len(verified),), LONGEST, device=DEVICE)
        tokens, numbers, _ = requests.follow(
            states,
            self.device.branches,
            self.device.draft,
            torch.tensor(verified, dtype=torch.int32, device=DEVICE),
            logits.argmax(dim=-1).to(DEVICE),
            positions,
            self.prompts,
            firsts,
            DRAFTED + 1,
        )
        for row, new in enumerate(emitted):
            if new:
                assert tokens[row, : int(numbers[row])].tolist() == new

    def _firsts(self, counts):
        ends = torch.tensor([0, *counts]).cumsum(0)
        return ends.to(torch.int32).to(DEVICE)

    def _draft(self, batch, logits, counts, emitted):
        states = torch.tensor([request.slot for request in batch], device=DEVICE)
        self.device.learn(
            states,
            self.totals,
            self.prompts,
            torch.tensor([len(new) for new in emitted], dtype=torch.int32, device=DEVICE),
            self._firsts(counts),
            self.device.best(logits.to(DEVICE)),
        )
        self.device.propose(states, self.roots)
        rows = [row for row, new in enumerate(emitted) if new]
        if not rows:
            return
        live = [batch[row] for row in rows]
        slots = torch.tensor([request.slot for request in live])
        new = [
            request
            for request in live
            if self.seen.get(request.slot) != len(request.text)
            or len(request.text) == request.began
        ]
        if new:
            of = torch.tensor([request.slot for request in new])
            self.host.begin(of, [request.text[:-1] for request in new])
            self.host.propose(of, torch.tensor([request.text[-1] for request in new]), 1)
        sizes = [counts[row] for row in rows]
        tokens = [emitted[row] for row in rows]
        self.host.observe(
            slots, StepLogits(logits, counts), rows, sizes, torch.tensor(padded(tokens))
        )
        draft = self.host.propose(slots, torch.tensor([each[-1] for each in tokens]), DRAFTED + 1)
        theirs = self.device.draft
        for at, request in enumerate(live):
            self.seen[request.slot] = len(request.text) + len(tokens[at])
            valid = theirs.valid[request.slot].tolist()
            assert draft.valid[at].tolist() == valid
            assert draft.tokens[at].tolist() == theirs.tokens[request.slot].tolist()
            request.draft = [
                token if there else -1
                for token, there in zip(draft.tokens[at, 1:].tolist(), valid[1:])
            ]

    def run(self):
        while self.waiting or self.running:
            self.step()
        return self


def tree_of_requests(rng, count):
    """Requests whose drafts are random trees of 9 nodes, and what each node follows."""
    context = torch.zeros((count, 32), dtype=torch.int32, device=DEVICE)
    found = DeviceRequests(AdaptiveDrafter(AdjacencyMatrix(V, 4), 8), context, 9)
    draft, parents = (
        found.draft,
        [[0, *(rng.randrange(i) for i in range(1, 9))] for _ in range(count)],
    )
    paths = []
    for row, of_row in enumerate(parents):
        followed = [[0]]
        for node in range(1, 9):
            followed.append([*followed[of_row[node]], node])
        paths.append(followed)
        draft.depths[row] = torch.tensor([len(path) - 1 for path in followed])
    draft.parents.copy_(torch.tensor(parents))
    draft.tokens.copy_(torch.tensor([[rng.randrange(6) for _ in range(9)] for _ in range(count)]))
    draft.valid.fill_(True)
    return found, paths


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_trees(seed):
    """Nodes are placed by depth; the path along what was chosen is accepted, and its keys moved."""
    rng, count = random.Random(seed), 4
    drafter, paths = tree_of_requests(rng, count)
    drafter.branches[2] = True  # whose tokens are those that the engine has verified
    sizes = [9, 4, 9, 1]  # nodes that are verified
    queries = [9, 4, 9, 12]  # the last row reads a prompt
    states = torch.tensor(rng.sample(range(count), count), device=DEVICE)
    slots = states.tolist()
    starts, firsts = (
        torch.tensor([0, *each]).cumsum(0).int().to(DEVICE) for each in (queries, sizes)
    )
    chain = torch.cat([20 * row + torch.arange(n) for row, n in enumerate(queries)])
    positions = chain.to(DEVICE)
    seen = torch.full((count, 9, 9), -7, dtype=torch.int32, device=DEVICE)
    depths = torch.zeros((count, 9), dtype=torch.int32, device=DEVICE)
    requests.place(states, drafter.draft, starts, firsts, positions, seen, depths)
    for row, (size, slot) in enumerate(zip(sizes[:3], slots)):
        for node in range(size):
            path = paths[slot][node]
            assert seen[row, node, : depths[row, node]].tolist() == path
            assert positions[starts[row] + node] == 20 * row + len(path) - 1
    assert positions[starts[3] :].equal(chain[starts[3] :].to(DEVICE))
    assert (depths[3] == 0).all()
    given = torch.cat([drafter.draft.tokens[slot, :size] for slot, size in zip(slots, sizes)])
    choices = torch.tensor([rng.randrange(6) for _ in given], device=DEVICE)
    prompts = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    at = torch.full_like(given, 99)

    def follow(prompts):
        drafts = drafter.branches, drafter.draft
        return requests.follow(states, *drafts, given.int(), choices, at, prompts, firsts, 9)

    emitted, counts, sources = follow(prompts)
    cache = torch.arange(40.0, device=DEVICE).reshape(10, 1, 4, 1).repeat(1, 2, 1, 4)
    of_step = torch.tensor(rng.sample(range(40), sum(queries)), device=DEVICE)
    expected = cache.clone().transpose(1, 2).flatten(0, 1)
    moved = 0
    for row, (size, slot) in enumerate(zip(sizes, slots)):
        tokens, path = [], [0]
        while True:
            tokens.append(int(choices[firsts[row] + path[-1]]))
            below = [
                node
                for node in range(1, size)
                if int(drafter.draft.parents[slot, node]) == path[-1]
                and int(drafter.draft.tokens[slot, node]) == tokens[-1]
            ]
            if not below:
                break
            path.append(below[0])
        assert emitted[row, : counts[row]].tolist() == tokens
        wanted = [*path, *range(len(path), size)]
        assert sources[firsts[row] : firsts[row] + size].tolist() == [
            int(firsts[row]) + node for node in wanted
        ]
        begin = int(starts[row + 1]) - size
        old = expected[of_step[[begin + node for node in path]]].clone()
        expected[of_step[begin : begin + len(path)]] = old
        moved += path != list(range(len(path)))
    caches = addresses([cache])
    move(caches, cache, of_step, starts, firsts, counts, sources)
    assert cache.transpose(1, 2).flatten(0, 1).equal(expected)
    print(f"\n{moved} paths moved, {int(counts.sum())} tokens")
    # Before the end of its prompt a request has no drafts.
    _, none, _ = follow(prompts + 100)
    assert (none == 1).all()


def test_ranks_verify_the_same_trees():
    """What the first rank has drafted takes the place of another's drafts."""
    first, _ = tree_of_requests(random.Random(1), 3)
    second, _ = tree_of_requests(random.Random(2), 3)
    first.draft.valid[1, 5:] = False
    states = torch.tensor([2, 1], device=DEVICE)
    others = second.draft.tokens[0].clone()
    packed = device_requests.pack_drafts(first.draft, states)
    device_requests.replace_drafts(second.draft, states, packed)
    for name in ("parents", "depths", "valid"):
        found, expected = (getattr(each.draft, name)[states, 1:] for each in (second, first))
        assert found.equal(expected)
    there = first.draft.valid[states, 1:]
    assert second.draft.tokens[states, 1:][there].equal(first.draft.tokens[states, 1:][there])
    assert second.draft.tokens[0].equal(others)


def check(service):
    """The whole life of the service, and what it has learnt."""
    service.run()
    mine, theirs = service.host.drafter.matrix, service.device.matrix
    theirs.store()
    stored = theirs._drafter.matrix
    assert stored.keys.equal(mine.keys)
    assert stored.evidence.equal(mine.evidence)
    assert torch.allclose(stored.weights, mine.weights, rtol=1e-3, atol=1e-4)
    assert (stored.all_candidates != mine.all_candidates).float().mean() < 0.02


def tensors(found, seen):
    """Bytes of all tensors of an object, and of what it is made of."""
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    if id(found) in seen or isinstance(found, (str, int, float, torch.device, type(None))):
        return 0
    seen.add(id(found))
    parts = found if isinstance(found, (tuple, list)) else getattr(found, "__dict__", {}).values()
    return sum(tensors(part, seen) for part in parts)


def test_a_service_of_two_hundred_requests():
    service = Service(3, 200)
    before = tensors(service.device, set())
    check(service)
    print(f"\n{service.drafted} drafts, {service.accepted} accepted tokens")
    assert service.accepted > 0.2 * service.drafted
    assert service.preempted > 5
    assert service.paused > 10
    assert tensors(service.device, set()) == before > 10_000


def begin_never(monkeypatch):
    """As if a slot's state were always that of its request."""
    whole = requests.verified

    def verified(states, state, draft, totals, prompts, sampled, firsts, sizes):
        state.lengths[states] = (totals[states] - sampled).long()
        none = torch.zeros_like(prompts)
        return whole(states, state, draft, totals, none, sampled, firsts, sizes)

    monkeypatch.setattr(device_requests, "verified", verified)


def never_forget(monkeypatch):
    """Requests that went on without drafts are taken for ones that did not."""
    monkeypatch.setattr(DeviceRequests, "forget", lambda self: None)
    begin_never(monkeypatch)


def ignore_sizes(monkeypatch):
    """Nodes that were not verified teach what was computed for others."""
    whole = requests.verified

    def verified(states, *arguments):
        *others, firsts, sizes = arguments
        return whole(states, *others, firsts * 0 + torch.arange(len(firsts)) * 99, sizes)

    monkeypatch.setattr(device_requests, "verified", verified)


def draft_in_prompts(monkeypatch):
    """In the middle of a prompt a root is appended to the text."""
    whole = DeviceRequests.propose

    def propose(self, states, roots):
        self.state.lengths.clamp_(min=3)
        whole(self, states, roots)

    monkeypatch.setattr(DeviceRequests, "propose", propose)


@pytest.mark.parametrize("fault", [begin_never, never_forget, ignore_sizes, draft_in_prompts])
def test_faults_show(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check(Service(3, 30))
