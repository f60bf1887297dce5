import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from token_recycling import AdjacencyMatrix, TokenRecyclingError
from token_recycling.drafting.matrix import STATE, fingerprint
from token_recycling.util.tokens import NO_TOKEN


def test_a_new_matrix_proposes_nothing():
    matrix = AdjacencyMatrix(20, 3, pairs=7, triples=11)
    assert (matrix.rows_seen, matrix.pairs_seen, matrix.triples_seen) == (0, 0, 0)
    assert matrix.all_candidates.shape == (20 + 7 + 11, 3)
    assert matrix.all_candidates.eq(NO_TOKEN).all()
    assert not matrix.seen(torch.arange(20)).any()


def test_repr():
    matrix = AdjacencyMatrix(32000, 8)
    matrix.update(torch.tensor([4]), torch.arange(8)[None])
    assert repr(matrix) == "<AdjacencyMatrix: 1 of 32000 tokens seen, k=8, 1.5 MiB>"


def test_memory_of_32k_tokens_is_below_two_megabytes():
    matrix = AdjacencyMatrix(32000, 8)
    assert matrix.nbytes == 32000 * 8 * (4 + 2) < 2_000_000
    assert (matrix.candidates.dtype, matrix.probabilities.dtype) == (torch.int32, torch.float16)


def test_rows_are_arrays_or_tensors():
    """As ``observe`` gets candidates as arrays and drafts as tensors."""
    tokens, ids, p = np.array([4, 2, 4]), np.array([[1, 2], [3, 4], [5, 6]]), np.full((3, 2), 0.25)
    both = [AdjacencyMatrix(20, 2) for _ in range(2)]
    both[0].update(torch.from_numpy(tokens), ids, torch.from_numpy(p), np.array([1, 1, 0], bool))
    both[1].update(tokens, torch.from_numpy(ids), p, torch.tensor([True, True, False]))
    for matrix in both:
        assert matrix.candidates[[4, 2]].tolist() == [[1, 2], [3, 4]]
        assert matrix.probabilities[4].tolist() == [0.25, 0.25]
        matrix.update(tokens, ids)
        assert matrix.candidates[4].tolist() == [5, 6]
        assert matrix.probabilities[4].tolist() == [0, 0]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_k_is_used(k):
    matrix = AdjacencyMatrix(20, k)
    matrix.update(torch.tensor([4]), torch.arange(k)[None])
    assert matrix.candidates.shape == (20, k)
    assert matrix.candidates[4].tolist() == list(range(k))
    others = [token for token in range(20) if token != 4]
    assert matrix.candidates[others].eq(NO_TOKEN).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_last_valid_row_of_a_repeated_token_wins(data):
    n = data.draw(st.integers(1, 40))
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    valid = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    rows = torch.randint(0, 6, (n, 2))
    probabilities = torch.rand(n, 2)
    matrix, expected = AdjacencyMatrix(6, 2, pairs=5, triples=7), {}
    matrix.update(torch.tensor(tokens), rows, probabilities, torch.tensor(valid))
    for i in range(n):
        if valid[i]:
            expected[tokens[i]] = i
    for token in range(6):
        i = expected.get(token)
        row = rows[i].tolist() if i is not None else [NO_TOKEN] * 2
        assert matrix.candidates[token].tolist() == row
        if i is not None:
            assert torch.equal(matrix.probabilities[token], probabilities[i].half())
    assert matrix.all_candidates[6:].eq(NO_TOKEN).all()  # rows of pairs and triples are untouched
    assert matrix.rows_seen == len(expected)


def test_pinned_memory_holds_what_was_learnt(monkeypatch):
    """Moved once; the functions that need a GPU are replaced."""
    pinned = []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda tensor: any(tensor is one for one in pinned)
    )
    matrix = AdjacencyMatrix(20, 2, pairs=3, triples=5)
    matrix.update(torch.tensor([4]), torch.tensor([[7, 9]]), torch.tensor([[0.5, 0.25]]))
    before = {name: getattr(matrix, name) for name in STATE}
    for _ in range(2):
        matrix.pin_memory()
    assert len(pinned) == len(STATE)
    for name, old in before.items():
        new = getattr(matrix, name)
        assert new.is_pinned()
        assert new is not old
        assert new.equal(old)


def test_save_and_load(tmp_path):
    matrix = AdjacencyMatrix(50, 4, fingerprint="50-abc")
    matrix.update(torch.tensor([3, 9]), torch.randint(0, 50, (2, 4)), torch.rand(2, 4))
    matrix.save(tmp_path / "m.safetensors")
    again = AdjacencyMatrix.load(tmp_path / "m.safetensors")
    assert again.fingerprint == "50-abc"
    assert torch.equal(again.candidates, matrix.candidates)
    assert torch.equal(again.probabilities, matrix.probabilities)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_file_is_read_under_autocast(tmp_path):
    AdjacencyMatrix(50, 4, pairs=7, triples=11).save(tmp_path / "m.safetensors")
    with torch.autocast("cpu", torch.bfloat16):
        again = AdjacencyMatrix.load(tmp_path / "m.safetensors")
    assert again.probabilities.dtype == torch.float16


def test_a_cut_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    AdjacencyMatrix(50, 4).save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TokenRecyclingError, match="damaged"):
        AdjacencyMatrix.load(path)
    from safetensors.torch import save_file

    save_file({"weights": torch.zeros(2)}, path)
    with pytest.raises(TokenRecyclingError, match="not a matrix file of format"):
        AdjacencyMatrix.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    AdjacencyMatrix(50, 4).save(path)
    before = path.read_bytes()

    def fail(path, content):
        path.write_text("half", "utf-8")
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(TokenRecyclingError, match="disk full"):
        AdjacencyMatrix(50, 4).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_merge():
    one, two = AdjacencyMatrix(30, 3), AdjacencyMatrix(30, 3)
    one.update(torch.tensor([1, 2]), torch.tensor([[4, 5, 6], [7, 8, 9]]))
    two.update(torch.tensor([2, 3]), torch.tensor([[8, 10, 7], [11, 12, 13]]))
    merged = one.merge(two)
    assert merged.candidates[1].tolist() == [4, 5, 6]
    assert merged.candidates[3].tolist() == [11, 12, 13]
    # 8: 1/4 + 1/2, 7: 1/2 + 1/8, 10: 1/4, 9: 1/8
    assert merged.candidates[2].tolist() == [8, 7, 10]
    assert merged.rows_seen == 3


def test_merge_averages_recorded_probabilities():
    one, two = AdjacencyMatrix(30, 2), AdjacencyMatrix(30, 2)
    one.update(torch.tensor([2]), torch.tensor([[7, 8]]), torch.tensor([[0.75, 0.25]]))
    two.update(torch.tensor([2]), torch.tensor([[9, 7]]), torch.tensor([[0.5, 0.25]]))
    merged = one.merge(two)
    assert merged.candidates[2].tolist() == [7, 9]
    assert merged.probabilities[2].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (AdjacencyMatrix(31, 3), "31"),
        (AdjacencyMatrix(30, 4), "k=4"),
        (AdjacencyMatrix(30, 3, fingerprint="other"), "a different tokenizer"),
    ],
)
def test_strangers_are_not_merged(other, message):
    with pytest.raises(TokenRecyclingError, match=message):
        AdjacencyMatrix(30, 3, fingerprint="own").merge(other)


def test_the_fingerprint_knows_the_tokenizer(bundled):
    class Other:
        def get_vocab(self):
            return bundled.tokenizer.get_vocab() | {"one more": 5}

    own = fingerprint(bundled.tokenizer, 4096)
    assert own == fingerprint(bundled.tokenizer, 4096)
    assert len({own, fingerprint(Other(), 4096), fingerprint(bundled.tokenizer, 4097)}) == 3
