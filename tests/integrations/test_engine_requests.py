"""Drafting for engines: requests that come and go get the drafts that they would get alone."""

import importlib
import random
import time
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from token_recycling import AdjacencyMatrix, TokenRecyclingError
from token_recycling.decoding.accept import accept_choices, greedy
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.ngram import Context
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.integrations.engines import versions
from token_recycling.integrations.engines.options import ServingOptions
from token_recycling.integrations.engines.requests import RequestDrafter, same_on_all_ranks
from token_recycling.integrations.engines.step_logits import StepLogits
from token_recycling.integrations.sglang.trees import full_masks, links
from token_recycling.util.tokens import NO_TOKEN
from toy import VOCABULARY, ToyTarget, next_logits

NODES = 13
K = 4


def make(name, requests=8, chain=False, context=256):
    matrix = AdjacencyMatrix(VOCABULARY, K)
    if name == "adaptive":
        drafter = AdaptiveDrafter(matrix, 24 if chain else NODES - 1)
    elif name == "prompt-lookup":
        drafter = PromptLookupDrafter()
    else:
        drafter = PaperDrafter(matrix, TreeTemplate.load("ranked", K).first(NODES - 1))
    return RequestDrafter(drafter, requests, NODES, context=context, chain=chain)


def plain_text(prompt, tokens):
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(next_logits(text).argmax()))
    return text[len(prompt) :]


class Engine:
    """Serves requests at random: some of them at a time, some drafts cut, some requests dropped."""

    def __init__(self, drafter, seed, tokens=60):
        self.drafter, self.rng, self.tokens = drafter, random.Random(seed), tokens
        self.texts, self.prompts, self.rows, self.drops = {}, {}, 0, 0

    def join(self, slot, prompt):
        """What an engine does when it has read a prompt: logits at its last token alone."""
        first = int(next_logits(prompt).argmax())
        slots = torch.tensor([slot])
        self.drafter.begin(slots, [prompt[:-1]])
        self.drafter.propose(slots, torch.tensor([prompt[-1]]), 1)
        answers = StepLogits(next_logits(prompt)[None], [1])
        self.drafter.observe(slots, answers, [0], [1], torch.tensor([[first]]))
        self.prompts[slot], self.texts[slot] = prompt, [*prompt, first]

    def step(self, live):
        slots = torch.tensor(live)
        roots = torch.tensor([self.texts[slot][-1] for slot in live])
        nodes = self.rng.choice([1, 4, NODES])
        draft = self.drafter.propose(slots, roots, nodes)
        target = ToyTarget()
        target.prefill([self.texts[slot][:-1] for slot in live])
        logits = target.verify(draft)
        scheduled = torch.tensor([self.rng.randint(1, draft.size) for _ in live])
        there = torch.arange(draft.size) < scheduled[:, None]
        draft.valid.logical_and_(there)
        accepted = accept_choices(draft, greedy(logits))
        # The engine's batch has the requests in another order, with padding behind their nodes.
        counts = [min(n + self.rng.randint(0, 2), draft.size) for n in scheduled.tolist()][::-1]
        flat = torch.cat([row[:count] for row, count in zip(logits.flip(0), counts)])
        rows = list(range(len(live)))[::-1]
        nodes = scheduled.tolist()
        self.drafter.observe(slots, StepLogits(flat, counts), rows, nodes, accepted.emitted)
        for slot, emitted in zip(live, accepted.emitted.tolist()):
            self.texts[slot] += [token for token in emitted if token != NO_TOKEN]
        self.rows += len(live)

    def run(self, requests, at_once=5):
        waiting, free, done = list(requests), list(range(8)), []
        self.rng.shuffle(free)
        while waiting or self.texts:
            while waiting and len(self.texts) < at_once:
                self.join(free.pop(), waiting.pop())
            live = list(self.texts)
            self.step(self.rng.sample(live, self.rng.randint(1, len(live))))
            for slot in live:
                new = self.texts[slot][len(self.prompts[slot]) :]
                dropped = self.rng.random() < 0.01
                if len(new) >= self.tokens or dropped:
                    self.drops += dropped
                    done.append((self.prompts[slot], new))
                    del self.texts[slot]
                    free.append(slot)
        return done


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("name", ["adaptive", "paper", "prompt-lookup"])
def test_requests_come_and_go(name, chain):
    rng = random.Random(7)
    requests = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    engine = Engine(make(name, chain=chain), seed=3)
    done = engine.run(requests)
    assert len(done) == 24
    assert engine.drops
    for prompt, new in done:
        assert new == plain_text(prompt, len(new))
    emitted = sum(len(new) - 1 for _, new in done)
    assert emitted > 1.05 * engine.rows  # and drafts were right


def alone(steps, drafter, prompt):
    """Drafts of one request in the ordinary way, with a context of fixed size."""
    text, found = list(prompt), []
    rows = drafter.new_state(1, 256)
    drafter.load(rows, [text[:-1]])
    for _ in range(steps):
        draft = drafter.propose(rows, torch.tensor([text[-1]]))
        found.append(draft.tokens[0].masked_fill(~draft.valid[0], NO_TOKEN).tolist())
        target = ToyTarget()
        target.prefill([text[:-1]])
        logits = target.verify(draft)
        accepted = accept_choices(draft, greedy(logits))
        drafter.observe(rows, draft, best_candidates(logits, drafter.k), accepted)
        text += [token for token in accepted.emitted[0].tolist() if token != NO_TOKEN]
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_a_request_is_drafted_for_as_if_alone(mixed):
    """Others in between change nothing but what is learnt; the control mixes up two requests."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = alone(12, AdaptiveDrafter(AdjacencyMatrix(VOCABULARY, K), NODES - 1), prompt)
    requests = make("adaptive")
    requests.begin(torch.tensor([2, 5]), [prompt[:-1], [7, 7, 7, 7]])
    text, found = list(prompt), []
    for step in range(12):
        slot = torch.tensor([5 if mixed and step == 6 else 2])
        draft = requests.propose(slot, torch.tensor([text[-1]]), NODES)
        found.append(draft.tokens[0].masked_fill(~draft.valid[0], NO_TOKEN).tolist())
        target = ToyTarget()
        target.prefill([text[:-1]])
        logits = target.verify(draft)
        accepted = accept_choices(draft, greedy(logits))
        answers = StepLogits(logits[0], [draft.size])
        requests.observe(slot, answers, [0], [draft.size], accepted.emitted)
        text += [token for token in accepted.emitted[0].tolist() if token != NO_TOKEN]
    assert (found == expected) is not mixed


@pytest.mark.parametrize("name", ["adaptive", "paper"])
def test_drafters_are_told_the_accepted_nodes(name, monkeypatch):
    """The tokens at the nodes of the path are those that were emitted."""
    seen = []
    drafter = make(name)
    observe = drafter.drafter.observe

    def watched(rows, draft, candidates, accepted):
        for row, count in enumerate(accepted.counts.tolist()):
            path = accepted.path[row, :count]
            assert path[0] == 0
            assert draft.tokens[row, path[1:]].equal(accepted.emitted[row, : count - 1])
            assert draft.parents[row, path[1:]].equal(path[:-1])
            seen.append(count)
        return observe(rows, draft, candidates, accepted)

    monkeypatch.setattr(drafter.drafter, "observe", watched)
    Engine(drafter, 3).run([[n % VOCABULARY, 3, 5] for n in range(6)])
    assert max(seen) > 2


def test_a_long_text_forgets_its_beginning():
    context = Context.empty(2, capacity=100, margin=20)
    context.load([list(range(1, 90)), [5, 6]])
    assert context.tokens[0, :80].tolist() == list(range(10, 90))  # as much as leaves the margin
    assert context.lengths.tolist() == [80, 2]
    context.append_roots(torch.tensor([90, 7]))
    selected = context.select(torch.tensor([1, 0]))
    selected.make_room()
    assert selected.lengths.tolist() == [3, 81 - 50]
    assert selected.tokens[0, :3].tolist() == [5, 6, 7]
    assert selected.tokens[1, :31].tolist() == list(range(60, 91))
    assert bool((selected.tokens[1, 31:] == NO_TOKEN).all())
    assert context.lengths.tolist() == [81, 3]  # the selected rows are copies
    engine = Engine(make("adaptive"), seed=1, tokens=600)
    for prompt, new in engine.run([[1, 2, 3], [4, 5]]):
        assert new == plain_text(prompt, len(new))


def test_the_best_branch():
    generator = torch.Generator().manual_seed(5)
    requests = make("adaptive", chain=True)
    drafter = requests.drafter
    tokens = torch.arange(VOCABULARY)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:K] for _ in tokens])
    p = torch.rand(VOCABULARY, K, generator=generator).sort(1, descending=True).values
    drafter.matrix.update(tokens, ids, p)
    slots, roots = torch.arange(3), torch.tensor([4, 5, 6])
    requests.begin(slots, [[1, 2], [2, 3], [5]])
    rows = drafter.new_state(3, 256)
    drafter.load(rows, [[1, 2], [2, 3], [5]])
    draft = drafter.propose(rows, roots)
    chain = requests.propose(slots, roots, NODES)
    for row in range(3):
        right = [0]
        while children := [
            node
            for node in range(1, draft.size)
            if draft.parents[row, node] == right[-1] and draft.valid[row, node]
        ]:
            right.append(min(children))
        valid = chain.valid[row]
        assert valid.tolist() == [i < len(right) for i in range(chain.size)]
        assert chain.tokens[row, valid].tolist() == draft.tokens[row, right].tolist()
        assert torch.equal(chain.scores[row, valid], draft.scores[row, right])
        assert chain.ancestors[row].tolist() == torch.ones(chain.size, chain.size).tril().tolist()
    assert chain.valid.sum(dim=1).max() > 2


def test_a_chain_continues_the_context():
    """Where the text repeats itself, a chain is what a search for its last n-gram finds."""
    generator = torch.Generator().manual_seed(6)
    text = torch.randint(VOCABULARY, (12,), generator=generator).tolist()
    requests = make("adaptive", chain=True)
    told = [*text, *text[:5]]
    requests.begin(torch.tensor([0]), [told[:-1]])
    found = requests.propose(torch.tensor([0]), torch.tensor([told[-1]]), 7)
    assert found.tokens[0].tolist() == text[4:11]  # the root, and what followed it
    new = next(token for token in range(VOCABULARY) if token not in text)
    requests.begin(torch.tensor([0]), [told[:-1]])
    found = requests.propose(torch.tensor([0]), torch.tensor([new]), 7)
    assert found.tokens[0, 1:].tolist() != text[5:11]  # nothing to continue


def test_drafts_shrink_with_the_batch():
    options = ServingOptions.parse({"max_step_tokens": "64"})
    assert [options.size_for(n, 33) for n in (1, 2, 4, 16, 64, 500)] == [33, 32, 16, 4, 1, 1]


@pytest.mark.parametrize(
    "given, says",
    [
        ({"trees": "paper"}, "no option 'trees'"),
        ({"max_step_tokens": "many"}, "max_step_tokens is 'many'; it must be a whole number"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0; it must be 1 or more"),
        ({"context": 10}, "it must be 256 or more"),
        ({"context": 1e30}, "it must be at most"),
        ({"save_minutes": float("inf")}, "save_minutes is inf; it must be a whole number"),
        ({"candidates": 2.7}, "candidates is 2.7; it must be a whole number"),
        ({"candidates": True}, "candidates is True; it must be a whole number"),
        ({"drafter": "paper", "tree": 7}, "tree is 7; it must be a string"),
        ({"matrix": ["a"]}, "it must be a string"),
    ],
)
def test_bad_options_are_refused(given, says):
    with pytest.raises(TokenRecyclingError, match=says):
        ServingOptions.parse(given)


def test_bad_drafters_are_refused(tmp_path):
    with pytest.raises(TokenRecyclingError, match="room for 7"):
        ServingOptions(drafter="paper", tree="chain-8").make(VOCABULARY, 7)
    with pytest.raises(TokenRecyclingError, match="shapes its own trees"):
        ServingOptions(tree="chain-4").make(VOCABULARY, 7)
    with pytest.raises(TokenRecyclingError, match="unknown drafter 'oracle'"):
        ServingOptions(drafter="oracle").make(VOCABULARY, 7)
    AdjacencyMatrix(VOCABULARY + 1, 8).save(tmp_path / "matrix")
    with pytest.raises(TokenRecyclingError, match="has 13 tokens and the engine"):
        ServingOptions(matrix=str(tmp_path / "matrix")).make(VOCABULARY, 7)


@pytest.mark.parametrize("name", ["adaptive", "paper", "prompt-lookup", "none"])
def test_every_drafter_can_serve(name):
    drafter = ServingOptions(drafter=name).make(VOCABULARY, NODES - 1)
    assert drafter.name == name
    requests, slots = RequestDrafter(drafter, 3, NODES, context=256), torch.tensor([2, 0])
    requests.begin(slots, [[1, 2, 3, 1, 2], [4, 5, 4]])
    draft = requests.propose(slots, torch.tensor([3, 5]), NODES)
    assert draft.tokens[:, 0].tolist() == [3, 5]
    copied = [bool(valid) for valid in draft.valid[:, 1:].any(dim=1)]
    assert copied == [name in ("adaptive", "prompt-lookup")] * 2


def test_a_matrix_file_is_continued(tmp_path):
    matrix = AdjacencyMatrix(VOCABULARY, K)
    matrix.update(torch.tensor([3]), torch.tensor([[7, 8, 9, 10]]))
    matrix.save(tmp_path / "matrix")
    options = ServingOptions(drafter="paper", tree="chain-4", matrix=str(tmp_path / "matrix"))
    requests = RequestDrafter(options.make(VOCABULARY, 4), 1, 5, context=256)
    draft = requests.propose(torch.tensor([0]), torch.tensor([3]), 5)
    assert draft.tokens[0][draft.valid[0]].tolist() == [3, 7]


def test_few_candidates_make_smaller_drafts():
    options = ServingOptions.parse({"candidates": 1, "drafter": "paper"})
    drafter = options.make(VOCABULARY, 60)
    requests = RequestDrafter(drafter, 2, 61, context=256)
    slots = torch.tensor([1])
    requests.begin(slots, [[1, 2, 3]])
    draft = requests.propose(slots, torch.tensor([1]), 61)
    assert draft.size < 61
    assert requests.drafts(slots).size == 61
    assert torch.equal(requests.drafts(slots).first(draft.size).valid, draft.valid)


def test_options_come_from_the_environment(monkeypatch, caplog):
    monkeypatch.setenv("TOKEN_RECYCLING_DRAFTER", "paper")
    monkeypatch.setenv("TOKEN_RECYCLING_MAX_STEP_TOKENS", "99")
    options = ServingOptions.from_environment()
    assert (options.drafter, options.max_step_tokens, options.tree) == ("paper", 99, None)
    assert not caplog.text


def grown(batch, seed=0):
    """Drafts of a matrix with random rows, with nodes that stand for no token among them."""
    generator = torch.Generator().manual_seed(seed)
    requests = make("paper", requests=batch)
    tokens = torch.randperm(VOCABULARY, generator=generator)[: VOCABULARY * 2 // 3]
    rows = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:K] for _ in tokens])
    requests.drafter.matrix.update(tokens, rows)
    return requests.propose(torch.arange(batch), tokens[:batch], NODES)


def test_links_lead_to_every_node_that_counts():
    draft = grown(3)
    children, siblings = links(draft)
    assert not bool(draft.valid.all())
    for row in range(3):
        reached = set()
        for node in range(draft.size):
            below = int(children[row, node])
            while below != -1:
                assert int(draft.parents[row, below]) == node
                assert below not in reached
                reached.add(below)
                below = int(siblings[row, below])
        assert reached == set(draft.valid[row].nonzero()[1:, 0].tolist())


def test_full_masks_are_the_context_and_the_ancestors():
    draft, lengths = grown(3), torch.tensor([5, 1, 9])
    flat = full_masks(draft, lengths, lengths)
    at = 0
    for row, length in enumerate(lengths.tolist()):
        whole = torch.cat([torch.ones(NODES, length, dtype=torch.bool), draft.ancestors[row]], 1)
        assert torch.equal(flat[at : at + whole.numel()], whole.flatten())
        at += whole.numel()
    assert at == len(flat)


PARTS = ("tokens", "parents", "depths", "ancestors", "valid")


def same_draft(one, other):
    assert one.max_depth == other.max_depth
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in PARTS)


class Group:
    """A tensor-parallel group of this rank and a rank 0 with another draft."""

    world_size, device = 2, torch.device("cpu")

    def __init__(self, of_rank_0=None):
        self.of_rank_0, self.sent = of_rank_0, []

    def broadcast(self, message, src):
        assert src == 0
        assert message.device == self.device
        self.sent.append(message)
        return message if self.of_rank_0 is None else self.of_rank_0.clone()


def test_a_draft_is_the_same_on_another_rank():
    drafts = grown(3), grown(3, seed=1)
    assert not same_draft(*drafts)  # or the following would prove nothing
    sender = Group()
    assert same_draft(same_on_all_ranks(sender, drafts[0]), drafts[0])
    (message,) = sender.sent
    assert message.is_contiguous()
    received = same_on_all_ranks(Group(message), drafts[1])
    assert same_draft(received, drafts[0])
    assert same_draft(DraftTree.unpack(message, drafts[0].max_depth), drafts[0])


def test_a_single_rank_sends_nothing():
    draft, group = grown(3), Group()
    assert same_on_all_ranks(None, draft) is draft
    group.world_size = 1
    assert same_on_all_ranks(group, draft) is draft
    assert not group.sent


@pytest.mark.parametrize(
    ("installed", "anyway", "refused"),
    [
        ("0.32.0", "", False),
        ("0.32.9", "", False),
        ("0.33.0", "", True),
        ("0.33.0", "1", False),
        (None, "", True),
        ("0.3", "", True),
    ],
)
def test_untested_versions_are_refused(installed, anyway, refused, monkeypatch):
    def version(package):
        if installed is None or package == "engine":
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setenv(versions.ANY, anyway)
    engine = versions._Release("Engine", ("engine", "engine-cpu"), ("0.32",))
    if not refused:
        versions.check_version(engine)
        return
    with pytest.raises(versions.EngineVersionError, match=r"was tested with Engine 0\.32; found"):
        versions.check_version(engine)


def test_changed_signatures_are_refused():
    versions.check_signature(plain_text, "prompt", "tokens")
    with pytest.raises(versions.EngineVersionError, match="plain_text takes prompt, tokens, not"):
        versions.check_signature(plain_text, "prompt")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_engine_the_plug_in_is_only_a_warning(engine, caplog):
    module = importlib.import_module(f"token_recycling.integrations.{engine}")
    module.register()
    assert "found none" in caplog.text


@pytest.mark.parametrize("given, expected", [("true", True), ("0", False), (False, False)])
def test_automatic_sizes_can_be_switched_off(given, expected):
    assert ServingOptions.parse({"automatic": given}).automatic is expected


def test_what_a_server_learns_is_saved_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda function: None)
    file = tmp_path / "learnt.safetensors"
    options = ServingOptions.parse({"save_matrix": str(file), "save_minutes": "1"})
    drafter = options.make(VOCABULARY, 8)
    keeper = options.keeper(drafter)
    assert file.exists()  # an unwritable file is reported at the start
    drafter.matrix.update(torch.tensor([3]), torch.tensor([[4] * drafter.matrix.k]))
    keeper.tick()
    assert AdjacencyMatrix.load(file).rows_seen == 0  # not yet
    monkeypatch.setattr(keeper, "_saved", keeper._saved - 61)
    keeper.tick()
    with keeper._writing:
        pass
    wait_until(lambda: AdjacencyMatrix.load(file).rows_seen == 1)
    drafter.matrix.update(torch.tensor([5]), torch.tensor([[4] * drafter.matrix.k]))
    keeper.save()
    again = options.make(VOCABULARY, 8)
    assert again.matrix.rows_seen == 2
    lost = ServingOptions.parse({"save_matrix": str(tmp_path / "missing" / "file")})
    with pytest.raises(TokenRecyclingError, match="cannot write"):
        lost.keeper(again)
    with pytest.raises(TokenRecyclingError, match="no matrix"):
        options.keeper(PromptLookupDrafter())


def test_a_failed_save_does_not_stop_the_server(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda function: None)
    folder = tmp_path / "folder"
    folder.mkdir()
    options = ServingOptions.parse({"save_matrix": str(folder / "learnt.safetensors")})
    keeper = options.keeper(options.make(VOCABULARY, 8))
    (folder / "learnt.safetensors").unlink()
    folder.rmdir()
    keeper.save()
    assert "was not saved" in caplog.text


def wait_until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")
