"""The adaptive drafter, part by part, against the same thing written as plainly as can be."""

import heapq
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import plain
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.accept import Accepted
from token_recycling.bench.prompts import DEMO
from token_recycling.draft_size.auto import AutoSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.drafters import AdaptiveDrafter
from token_recycling.drafters.calibration import PRIOR, SUREST, Calibration
from token_recycling.drafters.ngram import Context, NgramMatch, NgramMatcher
from token_recycling.drafters.sources import (
    BINS,
    DEPTHS,
    PAIR,
    RANKS,
    STATES,
    TOKEN,
    ChainSource,
    RowSource,
)
from token_recycling.drafters.tree_builder import HOPELESS, LEVELS, TreeBuilder
from token_recycling.explain import drafted_nodes, lines
from token_recycling.sequence import Sequence
from token_recycling.tokens import NO_TOKEN

V, K = 12, 3


def filled(seed, pairs=31, fraction=0.8):
    """A matrix with random rows, some tokens and pairs without."""
    rng = torch.Generator().manual_seed(seed)
    matrix = AdjacencyMatrix(V, K, pairs=pairs)
    for _ in range(3):
        tokens = torch.randint(0, V, (20,), generator=rng)
        before = torch.randint(0, V, (20,), generator=rng)
        ids = torch.stack([torch.randperm(V, generator=rng)[:K] for _ in range(20)])
        p = torch.rand(20, K, generator=rng).sort(dim=1, descending=True).values
        valid = torch.rand(20, generator=rng) < fraction
        matrix.average(before, tokens, ids, p, valid, old_weight=0.5)
    return matrix


def chain_of(tokens, run):
    return NgramMatch(
        torch.tensor([tokens], dtype=torch.long),
        torch.ones(1, len(tokens), dtype=torch.bool),
        torch.tensor([run]),
    )


# Rows


def test_rows_are_averaged_as_by_hand():
    """Token rows and pair rows, repeated ones and invalid ones."""
    rng = torch.Generator().manual_seed(3)
    matrix = AdjacencyMatrix(V, K, pairs=1009)
    rows = {}
    for _ in range(30):
        n = 9
        before = torch.randint(-1, V, (n,), generator=rng)
        tokens = torch.randint(0, V, (n,), generator=rng)
        ids = torch.stack([torch.randperm(V, generator=rng)[:K] for _ in range(n)])
        p = torch.rand(n, K, generator=rng).sort(dim=1, descending=True).values
        valid = torch.rand(n, generator=rng) < 0.7
        matrix.average(before, tokens, ids, p, valid, old_weight=0.25)
        old = dict(rows)
        for i in range(n):
            if not valid[i]:
                continue
            for key in (int(tokens[i]), (int(before[i]), int(tokens[i]))):
                new = dict(zip(ids[i].tolist(), p[i].tolist()))
                if key in old:
                    mixed = {t: 0.25 * q for t, q in old[key].items()}
                    for t, q in new.items():
                        mixed[t] = mixed.get(t, 0) + 0.75 * q
                    new = dict(sorted(mixed.items(), key=lambda pair: -pair[1])[:K])
                rows[key] = new
    for key, row in rows.items():
        if isinstance(key, int):
            found = dict(zip(matrix.candidates[key].tolist(), matrix.probabilities[key].tolist()))
        else:
            where, known = matrix.rows(torch.tensor(key[0]), torch.tensor(key[1]))
            assert known
            ids, p = matrix.fetch(where)
            found = dict(zip(ids.tolist(), p.tolist()))
        assert found == pytest.approx(row, abs=2e-3)
    assert matrix.pairs_seen == sum(isinstance(key, tuple) for key in rows)


def test_a_pair_never_seen_falls_back_to_its_token():
    matrix = AdjacencyMatrix(V, K, pairs=31)
    ids, p = torch.tensor([[4, 5, 6]]), torch.tensor([[0.5, 0.3, 0.2]])
    one, two = torch.tensor([1]), torch.tensor([2])
    matrix.average(one, two, ids, p, torch.tensor([True]), old_weight=0.5)
    matrix.average(torch.tensor([3]), two, ids + 3, p, torch.tensor([True]), old_weight=0.0)
    rows, known = matrix.rows(torch.tensor([1, 3, 7]), torch.tensor([2, 2, 2]))
    assert known.tolist() == [True, True, False]
    assert matrix.fetch(rows)[0].tolist() == [[4, 5, 6], [7, 8, 9], [7, 8, 9]]
    rows, known = matrix.rows(torch.tensor([1]), torch.tensor([NO_TOKEN]))
    assert matrix.fetch(rows)[0].tolist() == [[NO_TOKEN] * K]


def test_a_slot_belongs_to_its_last_pair():
    """Two pairs with one slot; within one call and in two."""
    matrix = AdjacencyMatrix(V, K, pairs=7)
    keys = {}
    for before in range(V):
        for token in range(V):
            keys.setdefault((before * V + token) % 7, []).append((before, token))
    first, second = keys[3][:2]
    ids, p = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[0.6, 0.3, 0.1]] * 2)
    pairs = torch.tensor([first, second]).T
    matrix.average(*pairs, ids, p, torch.tensor([True, True]), old_weight=0.9)
    rows, known = matrix.rows(*pairs)
    assert known.tolist() == [False, True]
    assert matrix.fetch(rows)[0][1].tolist() == [4, 5, 6]
    matrix.average(*pairs[:, :1], ids[:1], p[:1], torch.tensor([True]), old_weight=0.9)
    rows, known = matrix.rows(*pairs)
    assert known.tolist() == [True, False]
    assert matrix.fetch(rows)[0][0].tolist() == [1, 2, 3]  # nothing of the other pair's


def test_all_together_is_below_four_mebibytes_for_32k_tokens():
    matrix = AdjacencyMatrix(32_000, 8)
    AdaptiveDrafter(matrix)
    assert 3 * 2**20 < matrix.nbytes < 4 * 2**20
    double = AdjacencyMatrix(64_000, 8)
    AdaptiveDrafter(double)
    assert double.nbytes - matrix.nbytes == 32_000 * 8 * 6


# Sources


def test_both_rows_name_a_candidate_once():
    matrix = filled(5)
    before, tokens = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")
    state = torch.randint(0, STATES, before.shape)
    ids, features = RowSource(matrix).both(before, tokens, state)
    rows, known = matrix.rows(before, tokens)
    assert 0 < known.sum() < known.numel()
    expected = RowSource(matrix).expected()
    for b in range(V):
        for t in range(V):
            pair = matrix.fetch(rows[b, t])[0].tolist() if known[b, t] else []
            alone = matrix.candidates[t].tolist()
            found = [i for i in ids[b, t].tolist() if i != NO_TOKEN]
            assert len(set(found)) == len(found)
            assert set(found) == {i for i in pair + alone if i != NO_TOKEN}
            assert [i for i in found if i in pair] == pair
            for i, feature in zip(ids[b, t], features[b, t]):
                assert (expected[feature] > 0) == (i != NO_TOKEN)
                if i != NO_TOKEN:
                    kind, in_kind = divmod(int(feature), K * BINS)
                    assert kind % STATES == state[b, t]
                    row = pair if i in pair else alone
                    assert in_kind // BINS == row.index(i)
    best, of_best = RowSource(matrix).best(before, tokens)
    assert best.equal(matrix.fetch(rows)[0])
    assert (
        (of_best // (STATES * K * BINS)) == known[..., None] * PAIR + ~known[..., None] * TOKEN
    ).all()


def test_a_bin_is_half_an_octave():
    source = RowSource(AdjacencyMatrix(V, K))
    expected = source.expected()[:BINS]
    for p in (1.0, 0.99, 0.7, 0.51, 0.3, 1e-2, 1e-4):
        half = torch.tensor([p], dtype=torch.float16)
        bin_ = int(half.view(torch.int16).long() >> 9)
        assert 1 / 1.3 < expected[bin_] / p < 1.3
    assert expected[0] == 0


def test_the_chains_feature():
    chain = chain_of([4, 5, 6, 7, 8], run=11)
    below = torch.tensor([[4, 5, 6, 7, 8]])
    candidates = torch.tensor([[[4, 1, 2], [1, 5, 2], [1, 2, 6], [1, 2, 3], [NO_TOKEN] * 3]])
    found = ChainSource().of(chain, below, torch.arange(5), candidates)
    depths, ranks = [0, 1, 2, 2, 3], [1, 2, 3, 0, 0]
    assert found[0].tolist() == [(7 * len(DEPTHS) + d) * RANKS + r for d, r in zip(depths, ranks)]
    assert int(found.max()) < ChainSource.features == len(ChainSource().expected())
    runs = NgramMatch(chain.tokens.repeat(3, 1), chain.valid.repeat(3, 1), torch.tensor([0, 3, 4]))
    assert ChainSource.state(runs).tolist() == [0, 1, 2]


# Calibration


def test_probabilities_are_hits_over_trials():
    evidence, expected = torch.zeros(2, 4), torch.tensor([0.0, 0.5, 0.25, 1.0])
    calibration = Calibration(evidence, expected)
    assert calibration.logs.exp().tolist() == pytest.approx([0, 0.5, 0.25, SUREST])
    features = torch.tensor([[1, 1, 2], [1, 3, 3]])
    right = torch.tensor([[True, False, True], [True, True, True]])
    there = torch.tensor([[True, True, True], [False, True, True]])
    calibration.count(features, right, there)
    calibration.refresh()
    assert evidence.tolist() == [[0, 1, 1, 2], [0, 2, 1, 2]]
    rates = [0, (1 + PRIOR * 0.5) / (2 + PRIOR), (1 + PRIOR * 0.25) / (1 + PRIOR), SUREST]
    assert calibration.logs.exp().tolist() == pytest.approx(rates)


# The tree builder


def proposed(drafter, texts, roots):
    rows = drafter.new_rows(len(texts))
    drafter.load(rows, texts)
    return drafter.propose(rows, torch.tensor(roots))


def best_first(source, logs, root, before, chain, nodes):
    """{path: score} of the most likely nodes, by a heap and dictionaries."""

    def candidates(previous, token, position):
        args = [torch.tensor([[x]]) for x in (previous, token)]
        if position is None:
            ids, features = source.best(*args)
            return dict(zip(ids[0, 0].tolist(), logs[features[0, 0]].tolist())), None
        tokens = chain.tokens[0].tolist() if bool(chain.valid.any()) else []
        has = position < len(tokens)
        state = ChainSource.state(chain)[:, None] * has
        ids, features = source.both(*args, state)
        found = dict(zip(ids[0, 0].tolist(), logs[features[0, 0]].tolist()))
        if not has:
            return found, None
        below = torch.tensor([[tokens[position]]])
        feature = ChainSource().of(chain, below, torch.tensor([position]), ids) + source.features
        return found | {tokens[position]: float(logs[feature])}, tokens[position]

    heap, result = [(0.0, (), before, root, 0, 0)], {}
    while heap and len(result) <= nodes:
        score, path, previous, token, position, off = heapq.heappop(heap)
        result[path] = exp(-score)
        if off == LEVELS:
            continue
        found, on_chain = candidates(previous, token, position)
        for child, more in found.items():
            if child != NO_TOKEN and more > float("-inf"):
                goes_on = child == on_chain
                heapq.heappush(
                    heap,
                    (
                        score - more,
                        (*path, child),
                        token,
                        child,
                        position + 1 if goes_on else None,
                        0 if goes_on else off + 1,
                    ),
                )
    return result


def paths_of(draft, row=0):
    paths = []
    for node in range(draft.tokens.shape[1]):
        parent = int(draft.parents[row, node])
        above = paths[parent] if node else None
        paths.append((*above, int(draft.tokens[row, node])) if node else ())
    return paths


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([0, 1, 3, 6]), st.integers(5, 30))
def test_the_draft_has_the_most_likely_nodes(seed, length, nodes):
    matrix = filled(seed)
    rng = torch.Generator().manual_seed(seed)
    source = RowSource(matrix)
    expected = torch.cat([source.expected(), ChainSource().expected()])
    evidence = torch.rand(2, len(expected), generator=rng).sort(dim=0).values * 5
    calibration = Calibration(evidence, expected)
    tokens = torch.randint(0, V, (length,), generator=rng).tolist()
    chain = chain_of(tokens, run=int(torch.randint(1, 9, (), generator=rng)))
    builder = TreeBuilder(source, ChainSource(), calibration, nodes, length)
    builder.width = 10_000  # of a level every node gets children
    root, before = torch.randint(0, V, (2,), generator=rng).tolist()
    draft = builder(torch.tensor([root]), torch.tensor([before]), chain)
    wanted = best_first(source, calibration.logs, root, before, chain, nodes)
    wanted = {path: score for path, score in wanted.items() if score > HOPELESS}
    valid = draft.valid[0].tolist()
    found = {
        path: float(score)
        for path, score, there in zip(paths_of(draft), draft.scores[0], valid)
        if there
    }
    assert sorted(found.values()) == pytest.approx(sorted(wanted.values()), rel=1e-3)
    least = min(wanted.values()) * 1.001
    assert {p for p, s in found.items() if s > least} == {p for p, s in wanted.items() if s > least}

    # The draft is what ``DraftTree`` says that it is.
    n = len(valid)
    assert draft.scores[0].tolist() == sorted(draft.scores[0].tolist(), reverse=True)
    assert valid == sorted(valid, reverse=True)
    for node in range(1, n):
        if valid[node]:
            parent = int(draft.parents[0, node])
            assert parent < node
            above = draft.ancestors[0, parent].clone()
            above[node] = True
            assert draft.ancestors[0, node].equal(above)
            assert int(draft.depths[0, node]) == int(draft.depths[0, parent]) + 1
    paths = [path for path, there in zip(paths_of(draft), valid) if there]
    assert len(set(paths)) == len(paths)  # no token twice below one node


def test_a_batch_grows_row_by_row():
    matrix = filled(8)
    drafter = AdaptiveDrafter(matrix, 20)
    texts = [[1, 2, 3, 1, 2], [5], [7, 7, 7, 7]]
    whole = proposed(drafter, texts, [3, 6, 7])
    for row, (text, root) in enumerate(zip(texts, (3, 6, 7))):
        alone = proposed(drafter, [text], [root])
        assert alone.tokens[0].equal(whole.tokens[row])
        assert alone.ancestors[0].equal(whole.ancestors[row])
        assert alone.scores[0].allclose(whole.scores[row])


# The whole


def asked(bundled, questions):
    """Prompts of chat, and the plain answers to them."""
    prompts = [
        bundled.tokenizer.apply_chat_template(
            [{"role": "user", "content": q}] if isinstance(q, str) else q,
            add_generation_prompt=True,
            return_dict=False,
        )
        for q in questions
    ]
    return prompts, [plain(bundled.model, prompt, 80) for prompt in prompts]


@pytest.fixture(scope="module")
def greedy(bundled):
    return asked(bundled, DEMO[:4])


def mat(recycler, prompts, expected, **options):
    answers = [recycler.generate(p, max_new_tokens=80, **options) for p in prompts]
    assert [a.token_ids for a in answers] == expected
    return sum(a.stats.new_tokens - 1 for a in answers) / sum(a.stats.steps for a in answers)


def test_it_drafts_better_than_the_paper_and_every_part_helps(bundled, greedy):
    """Sixteen good nodes are worth the paper's eighty."""

    def run(drafter, tree):
        made = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter, tree=tree)
        mat(made, *greedy)
        return mat(made, *greedy)

    paper, few, many = run("paper", "paper"), run("adaptive", "ranked-16"), run("adaptive", "paper")
    assert few > paper
    assert many > 1.25 * paper
    for part in ("pairs", "chain"):
        assert run(f"adaptive-no-{part}", "ranked-16") < few


def test_a_poisoned_matrix_recovers(bundled, greedy):
    """Random rows and counts: the same text, and soon the same speed."""
    torch.manual_seed(1)
    more = asked(bundled, DEMO[4:])
    clean = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    poisoned = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    matrix = poisoned.matrix
    matrix._candidates[1:].random_(0, matrix.vocab_size)
    matrix._probabilities[1:].copy_(torch.randn(matrix._probabilities[1:].shape).softmax(dim=1))
    matrix._keys[:-1] = torch.randint(0, matrix.vocab_size**2, (matrix.pairs,))
    matrix.evidence.uniform_(0, 1)
    first, later = mat(poisoned, *greedy), mat(poisoned, *more)
    healthy_first, healthy = mat(clean, *greedy), mat(clean, *more)
    assert first < healthy_first
    assert later > 0.9 * healthy


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("chain", [0, 2, 16])
def test_few_candidates_make_smaller_trees(k, chain):
    matrix = AdjacencyMatrix(50, k)
    drafter = AdaptiveDrafter(matrix, 80, chain=chain)
    ids = (torch.arange(50)[:, None] + torch.arange(1, k + 1)) % 50
    matrix.update(torch.arange(50), ids, torch.full((50, k), 0.9 / k))
    draft = proposed(drafter, [[1, 2, 3]], [4])
    assert draft.nodes == len(drafter.acceptance) + 1 == drafter.builder.nodes + 1
    assert draft.valid.sum() > 1
    policy, sequences = AutoSize(drafter.acceptance, CostCurve.assumed("cuda")), [Sequence([1, 4])]
    policy.begin(sequences)
    assert policy.limit() is None
    assert policy.choose(draft, sequences) > 1


def test_unseen_text_grows_no_tree(bundled):
    """A cold matrix and a text without repetition: nothing to verify."""
    drafter = AdaptiveDrafter(AdjacencyMatrix(100, 8))
    draft = proposed(drafter, [list(range(50))], [60])
    assert draft.valid.sum() == 1


def test_a_step_without_a_draft_joins_the_context(bundled):
    """A step without a draft, then one with: the chain knows the tokens between."""
    text = [5, 6, 7, 8, 9, 5, 6]
    drafter = AdaptiveDrafter(AdjacencyMatrix(100, 8), 10)
    rows = drafter.new_rows(1)
    drafter.load(rows, [text])
    draft = drafter.propose(rows, torch.tensor([7]), 1)
    assert draft.tokens.tolist() == [[7]]
    path, emitted = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[8]])
    accepted = Accepted(path, emitted, torch.tensor([1]), [[8]], [None], [0])
    drafter.observe(rows, draft, torch.zeros(1, 1, 100), accepted)
    draft = drafter.propose(rows, torch.tensor([8]))
    assert 9 in draft.tokens[0].tolist()
    assert rows.context.last(4).tolist() == [[5, 6, 7, 8]]


def test_the_tree_builder_has_a_negative_control(bundled, greedy, monkeypatch):
    """Parents that are not the nodes' own: the text stays, or the probe of this file is blind."""

    class Wrong(TreeBuilder):
        def _draft(self, tokens, parents, scores):
            draft = super()._draft(tokens, parents, scores)
            draft.parents[:, 2:] = (draft.parents[:, 2:] + 1) % 2
            return draft

    monkeypatch.setattr("token_recycling.drafters.adaptive.TreeBuilder", Wrong)
    prompts, expected = greedy
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    found = [recycler.generate(p, max_new_tokens=80).token_ids for p in prompts]
    assert found != expected


def test_what_is_no_token_matches_nothing():
    context = Context.empty(1, 8, "cpu")
    context.load([[1, 2]])
    assert context.last(4).tolist() == [[NO_TOKEN, NO_TOKEN, 1, 2]]
    assert NgramMatcher(8, "cpu")(context, 3).run.tolist() == [0]


def explaining(recycler, steps):
    """An ``on_draft`` that appends (nodes, emitted tokens) of every step to ``steps``."""

    def on_draft(rows, draft, accepted):
        nodes = drafted_nodes(recycler.drafter, rows, draft, accepted)
        steps.append((nodes, accepted.tokens[0]))

    return on_draft


def test_explained_steps_say_what_was_drafted(bundled):
    """Every node accepted is marked, sources are named, and the text is the same."""
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    prompt = "Once upon a time there was a fox. The fox said: Once upon"
    for _ in range(2):
        expected = recycler.generate(prompt, max_new_tokens=40).token_ids
    steps = []
    answer = recycler.generate(prompt, max_new_tokens=40, on_draft=explaining(recycler, steps))
    assert answer.token_ids == expected
    assert [t for _, emitted in steps for t in emitted] == expected[1:]
    for nodes, emitted in steps:
        assert [node.token for node in nodes if node.accepted][1:] == emitted[:-1]
        drawn = list(lines(nodes, emitted, str))
        assert len(drawn) == len(nodes) + 1
        assert sum("accepted" in line for line in drawn) == len(emitted) - 1
    sources = {node.source for nodes, _ in steps for node in nodes[1:]}
    assert sources == {"chain", "pair", "token"}
    wrong = [(nodes[:1], emitted) for nodes, emitted in steps if len(emitted) > 1]
    assert wrong  # or nothing was there to be marked


def test_what_was_promised_comes(bundled, greedy):
    """The sum of the scores is the MAT, corrected by what came of such sums before."""
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    for _ in range(2):
        mat(recycler, *greedy)
    steps = []
    mat(recycler, *greedy, on_draft=explaining(recycler, steps))
    promised = sum(sum(node.score for node in nodes) for nodes, _ in steps)
    came = sum(len(emitted) for _, emitted in steps)
    assert 0.8 < promised / came < 1.25


# Hot start that travels


def learnt(bundled, prompts):
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16")
    for prompt in prompts:
        recycler.generate(prompt, max_new_tokens=60)
    return recycler.matrix


def test_one_file_holds_all_that_was_learnt(bundled, greedy, tmp_path):
    prompts, expected = greedy
    matrix = learnt(bundled, prompts)
    matrix.save(tmp_path / "m.safetensors")
    again = AdjacencyMatrix.load(tmp_path / "m.safetensors")
    for name, tensor in matrix.state().items():
        assert tensor.any()
        assert again.state()[name].equal(tensor), name
    steps = []
    for made in (matrix, again):
        recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16", matrix=made)
        answer = recycler.generate(prompts[0], max_new_tokens=80)
        assert answer.token_ids == expected[0]
        steps.append(answer.stats.steps)
    assert steps[0] == steps[1]


def test_two_are_merged(bundled, greedy):
    """What only one knows is kept; counts are added; the merged one drafts for both texts."""
    prompts, _ = greedy
    first, second = learnt(bundled, prompts[:1]), learnt(bundled, prompts[2:3])
    merged = first.merge(second)
    assert merged.evidence.equal(first.evidence + second.evidence)
    assert max(first.pairs_seen, second.pairs_seen) < merged.pairs_seen
    assert merged.pairs_seen <= first.pairs_seen + second.pairs_seen
    known = first._keys[:-1] != merged._keys[:-1]
    assert (first._keys[:-1][known] == torch.iinfo(torch.int64).min).all()  # the first one wins
    for prompt in (prompts[0], prompts[2]):

        def steps(matrix, prompt=prompt):
            recycler = TokenRecycling(
                bundled.model, bundled.tokenizer, tree="ranked-16", matrix=matrix
            )
            return recycler.generate(prompt, max_new_tokens=60).stats.steps

        assert steps(merged.clone()) < steps(None)
    plain_one = AdjacencyMatrix(merged.vocab_size, merged.k)
    assert plain_one.merge(second).pairs_seen == second.pairs_seen
    with pytest.raises(TokenRecyclingError, match="pair slots"):
        AdjacencyMatrix(merged.vocab_size, merged.k, pairs=7).merge(second)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("pair_keys"),
        lambda t: t.update(pair_keys=t["pair_keys"][:-1]),
        lambda t: t.update(pair_candidates=t["pair_candidates"][:, :-1]),
        lambda t: t.update(pair_candidates=t["pair_candidates"] + 10_000),
        lambda t: t.update(pair_probabilities=t["pair_probabilities"].float()),
        lambda t: t.update(evidence=t["evidence"][0]),
    ],
)
def test_a_damaged_file_is_refused(damage, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    matrix = filled(4)
    matrix.evidence = torch.ones(2, 5)
    matrix.save(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "m.safetensors", metadata=about)
    with pytest.raises(TokenRecyclingError, match=r"not a matrix file of format|outside"):
        AdjacencyMatrix.load(tmp_path / "m.safetensors")


def test_a_file_of_the_papers_drafter_can_be_continued(bundled, greedy, tmp_path):
    """Rows without probabilities are worth their ranks."""
    prompts, expected = greedy
    paper = TokenRecycling(bundled.model, bundled.tokenizer, drafter="paper", tree="paper")
    assert paper.generate(prompts[0], max_new_tokens=80).token_ids == expected[0]
    paper.matrix.save(tmp_path / "m.safetensors")

    def steps(matrix):
        recycler = TokenRecycling(bundled.model, bundled.tokenizer, tree="ranked-16", matrix=matrix)
        answer = recycler.generate(prompts[0], max_new_tokens=80)
        assert answer.token_ids == expected[0]
        return answer.stats.steps

    assert steps(tmp_path / "m.safetensors") < steps(None)
