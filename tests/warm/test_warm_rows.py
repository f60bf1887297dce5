"""Warm rows: what the model predicts after each token on its own, kept per checkpoint."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import warnings
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from architectures import VOCABULARY, make
from letters import letters
from models import REFUSED, SUPPORTED, plain, random_prompts
from token_recycling import (
    AdjacencyMatrix,
    PlainDecodingWarning,
    TokenRecycling,
    TokenRecyclingError,
    defaults,
    enable,
)
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.matrix_file import FORMAT
from token_recycling.integrations.engines.options import ServingOptions
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.probe import open_target
from token_recycling.model.target import TreeTarget
from token_recycling.util.tokens import NO_TOKEN
from token_recycling.warm import context as contexts
from token_recycling.warm import fill as filling
from token_recycling.warm import store
from token_recycling.warm.fill import fill
from token_recycling.warm.identity import weights_name
from token_recycling.warm.start import kept_rows, warm_up
from token_recycling.warm.store import WarmRows

[PROMPT] = random_prompts([12])
K = 8


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the rows' files."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "rows"
    for thread in threading.enumerate():
        if thread.name == "keep warm rows":  # it would write into the folder of the next test
            thread.join()


@pytest.fixture
def forwards(monkeypatch):
    """The shape of the tokens of every forward for warm rows, as they come."""
    shapes, read = [], TreeTarget.read_independent

    def counting(self, tokens, **options):
        shapes.append(tuple(tokens.shape))
        return read(self, tokens, **options)

    monkeypatch.setattr(TreeTarget, "read_independent", counting)
    return shapes


@pytest.fixture
def clock(monkeypatch):
    """A clock for ``fill`` that advances by a second whenever it is read."""
    times = iter(range(10**6))
    monkeypatch.setattr(filling, "perf_counter", lambda: float(next(times)))


@pytest.fixture
def automatic(monkeypatch):
    """The defaults of the library, without those of the tests."""
    monkeypatch.setattr(defaults, "WARM_SECONDS", 60.0)


def target_of(name="llama", **changes):
    return open_target(make(name, **changes))


def filled(target, **options):
    matrix = AdjacencyMatrix(target.vocab_size, K)
    return matrix, fill(target, matrix, **options)


def same(one, other):
    return torch.equal(one.candidates, other.candidates) and torch.equal(
        one.probabilities, other.probabilities
    )


class TestFill:
    @pytest.mark.parametrize("prefix", [(), (1,), (5, 7)])
    @pytest.mark.parametrize("name", SUPPORTED)
    def test_rows_are_those_of_a_plain_forward(self, name, prefix):
        target = target_of(name)
        matrix, done = filled(target, prefix=prefix)
        assert (done.computed, done.complete, done.failure) == (VOCABULARY, True, None)
        for token in range(0, VOCABULARY, 7):
            with torch.no_grad():
                ids = torch.tensor([[*prefix, token]])
                logits = target.model(input_ids=ids).logits[0, -1, :VOCABULARY]
            values = logits.topk(K).values
            row = matrix.candidates[token].long()
            assert torch.allclose(logits[row], values, atol=1e-3)
            right = values.softmax(0)
            assert torch.allclose(matrix.probabilities[token].float(), right, atol=2e-3)

    def test_a_prefix_makes_a_difference(self):
        """The negative control of the test above."""
        target = target_of()
        assert not same(filled(target)[0], filled(target, prefix=(5, 7))[0])

    @pytest.mark.parametrize("k", [1, 3, VOCABULARY])
    def test_any_k(self, k):
        target = target_of()
        matrix = AdjacencyMatrix(VOCABULARY, k)
        assert fill(target, matrix).computed == VOCABULARY
        assert bool((matrix.candidates != NO_TOKEN).all())
        assert torch.allclose(matrix.probabilities.float().sum(1), torch.ones(1), atol=0.05)

    def test_rows_that_exist_are_kept(self):
        target, matrix = target_of(), AdjacencyMatrix(VOCABULARY, K)
        tokens, row = torch.tensor([3, 90]), torch.arange(2 * K).view(2, K)
        matrix.update(tokens, row, torch.full((2, K), 0.25))
        assert fill(target, matrix).computed == VOCABULARY - 2
        assert torch.equal(matrix.candidates[tokens].long(), row)
        assert bool((matrix.probabilities[tokens] == 0.25).all())

    def test_nothing_missing_is_no_forward(self, forwards):
        target = target_of()
        matrix, _ = filled(target)
        forwards.clear()
        assert fill(target, matrix).computed == 0
        assert forwards == []

    @pytest.mark.usefixtures("clock")
    def test_it_stops_when_the_time_is_used_up_and_goes_on_later(self):
        target = target_of()
        whole, _ = filled(target)
        matrix, done = filled(target, seconds=1.5)  # time for one batch
        assert (done.computed, done.complete) == (filling.FIRST_BATCH, False)
        assert bool(matrix.seen(torch.arange(filling.FIRST_BATCH)).all())
        assert matrix.rows_seen == filling.FIRST_BATCH
        done = fill(target, matrix)
        assert (done.computed, done.complete) == (VOCABULARY - filling.FIRST_BATCH, True)
        assert torch.allclose(matrix.probabilities, whole.probabilities, atol=2e-3)

    @pytest.mark.usefixtures("clock")
    def test_given_tokens_come_first(self):
        matrix, _ = filled(target_of(), tokens=[90, 5, 90, 4000, -1], seconds=1.5)
        expected = {90, 5, *range(filling.FIRST_BATCH - 1)}
        assert set(matrix.seen(torch.arange(VOCABULARY)).nonzero()[:, 0].tolist()) == expected

    @pytest.mark.usefixtures("clock")
    def test_it_stops_when_it_is_told_to(self, forwards):
        target = target_of()
        answers = iter([False, False, True])
        matrix, done = filled(target, stop=lambda: next(answers))
        assert (done.complete, done.failure) == (False, None)
        assert forwards[0] == (filling.STOPPABLE_BATCH, 1)
        assert done.computed == sum(batch for batch, _ in forwards) < VOCABULARY
        assert len(forwards) == 2
        assert fill(target, matrix).complete

    def test_batches_grow_within_the_bytes_of_their_logits(self, forwards, monkeypatch):
        target = target_of()
        filled(target)
        assert [shape[0] for shape in forwards] == [32, 64]
        forwards.clear()
        monkeypatch.setattr(filling, "LOGIT_BYTES", 10 * 8 * VOCABULARY)
        filled(target)
        assert [shape[0] for shape in forwards] == [10] * 9 + [6]

    def test_slow_batches_shrink(self, forwards, clock):
        filled(target_of())
        assert [shape[0] for shape in forwards][:5] == [32, 16, 8, 4, 2]

    def test_logits_that_are_not_finite_give_no_row(self):
        target = target_of()
        target.model.get_input_embeddings().weight.data[7] = float("nan")
        matrix, done = filled(target)
        assert (done.computed, done.complete) == (VOCABULARY - 1, True)
        assert not matrix.seen(torch.tensor(7))

    def test_a_failure_ends_it_without_an_error(self, monkeypatch):
        target = target_of()

        def fails(*args, **options):
            raise RuntimeError("no room\non this device")

        monkeypatch.setattr(target.model, "forward", fails)
        matrix, done = filled(target)
        assert (done.computed, done.complete) == (0, False)
        assert done.failure == "RuntimeError: no room on this device"
        assert matrix.rows_seen == 0

    def test_progress(self):
        seen = []
        filled(target_of(), on_progress=lambda *counts: seen.append(counts))
        assert seen == [(32, VOCABULARY), (96, VOCABULARY)]

    def test_the_context_is_not_touched(self):
        recycler = TokenRecycling(make("llama"))
        recycler.generate(PROMPT, max_new_tokens=20, keep_context=True)
        lengths = list(recycler.target.cache.lengths)
        entries = [part.clone() for part in recycler.target.cache.entries(0, 8)]
        fill(recycler.target, AdjacencyMatrix(VOCABULARY, K))
        assert recycler.target.cache.lengths == lengths
        for before, now in zip(entries, recycler.target.cache.entries(0, 8)):
            assert torch.equal(before, now)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype):
        matrix, done = filled(open_target(make("llama").to(dtype)))
        assert done.computed == VOCABULARY
        assert matrix.probabilities.isfinite().all()

    def test_under_autocast_and_in_inference_mode(self):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            recycler = TokenRecycling(make("llama"), warm=True)
        assert recycler.matrix.rows_seen == VOCABULARY
        recycler.reset()  # in-place, outside inference mode
        assert recycler.generate(PROMPT, max_new_tokens=20).token_ids == plain(
            recycler.model, PROMPT, 20
        )

    def test_copying_writes_missing_rows_only(self):
        rows, _ = filled(target_of())
        matrix = AdjacencyMatrix(VOCABULARY, K, pairs=7)
        matrix.update(torch.tensor([4]), torch.arange(K)[None], torch.full((1, K), 0.5))
        matrix.start_from(rows)
        assert matrix.candidates[4].tolist() == list(range(K))
        others = torch.arange(VOCABULARY) != 4
        assert torch.equal(matrix.candidates[others], rows.candidates[others])


class StubTarget:
    """Predicts the next id after two tokens or more; after a token alone, what it is told to."""

    vocab_size, device, dtype = VOCABULARY, torch.device("cpu"), torch.float32
    max_context, slices_logits = None, True
    inference_context = staticmethod(torch.inference_mode)

    def __init__(self, alone):
        self.alone = alone  # added to a token on its own

    def read_independent(self, tokens, *, last=False):
        ahead = torch.ones_like(tokens) if tokens.shape[1] > 1 else torch.full_like(
            tokens, self.alone
        )  # fmt: skip
        logits = torch.nn.functional.one_hot((tokens + ahead) % VOCABULARY, VOCABULARY).float()
        return logits[:, -1:] if last else logits


class TestContext:
    def test_of_a_tokenizer(self, bundled):
        found = contexts.contexts(bundled.tokenizer, 4096)
        assert [one.name for one in found] == ["nothing", "bos", "newline", "assistant"]
        decoded = [bundled.tokenizer.decode(one.tokens) for one in found]
        assert decoded == ["", "<|begin|>", "\n", "<|assistant|>"]
        assert contexts.contexts(None, 4096) == [contexts.NOTHING]
        assert [one.name for one in contexts.contexts(letters(), VOCABULARY)] == ["nothing", "bos"]
        assert contexts.contexts(bundled.tokenizer, 1)[1:] == [contexts.WarmPrefix("bos", (0,))]

    def test_a_template_that_fails_or_has_no_header(self, bundled):
        tokenizer = copy.deepcopy(bundled.tokenizer)
        for template in ("{{ raise_exception('no') }}", "{{ messages[0].content }}", "{% if %}"):
            tokenizer.chat_template = template
            assert "assistant" not in {one.name for one in contexts.contexts(tokenizer, 4096)}

    def test_the_one_that_predicts_best_is_chosen(self):
        tokenizer = letters()
        context, scores = contexts.choose(StubTarget(alone=2), tokenizer, 1, 10**6)
        assert context == contexts.WarmPrefix("bos", (1,))
        assert scores == {"nothing": 0.0, "bos": 1.0}

    def test_a_tie_is_nothing(self):
        context, scores = contexts.choose(StubTarget(alone=1), letters(), 1, 10**6)
        assert context == contexts.NOTHING
        assert scores == {"nothing": 1.0, "bos": 1.0}

    def test_without_a_tokenizer_nothing_is_measured(self, forwards):
        assert contexts.choose(target_of(), None, K, 10**6) == (contexts.NOTHING, {})
        assert forwards == []

    def test_its_cost_is_bounded(self, forwards, bundled):
        contexts.choose(bundled.target, bundled.tokenizer, K, bundled.target.vocab_size)
        alone = sum(rows * length for rows, length in forwards if rows > 1)
        assert alone <= contexts.SHARE * bundled.target.vocab_size

    def test_of_the_bundled_model(self, bundled):
        context, scores = contexts.choose(bundled.target, bundled.tokenizer, K, 10**6)
        assert context == contexts.NOTHING
        assert scores["nothing"] > scores["newline"] > 0.3


class TestName:
    def test_other_weights_have_another(self):
        model = make("llama")
        name = weights_name(model)
        assert name == weights_name(make("llama"))
        for parameter in (model.lm_head.weight, model.model.layers[1].mlp.up_proj.weight):
            before = parameter.data.clone()
            parameter.data *= 1.01
            assert weights_name(model) != name
            parameter.data = before
            assert weights_name(model) == name

    def test_another_configuration_has_another(self):
        model = make("llama")
        name = weights_name(model)
        model.config.rms_norm_eps = 0.1
        assert weights_name(model) != name

    def test_float32_and_bfloat16_have_the_same(self):
        model = make("llama")
        name = weights_name(model)
        assert weights_name(model.to(torch.bfloat16)) == name

    def test_weights_that_are_not_in_memory_have_none(self):
        assert weights_name(make("llama").to("meta")) is None


class TestCache:
    def test_a_second_recycler_computes_nothing(self, forwards, folder):
        model = make("llama")
        first = TokenRecycling(model, warm=True)
        assert first.warm_rows.computed == VOCABULARY == first.matrix.rows_seen
        assert [first.warm_rows.path] == list(folder.iterdir())
        forwards.clear()
        second = TokenRecycling(make("llama"))  # by default, kept rows are used
        assert forwards == []
        assert same(first.matrix, second.matrix)
        assert (second.warm_rows.computed, second.warm_rows.path) == (0, first.warm_rows.path)

    def test_other_weights_do_not_find_them(self, forwards):
        model = make("llama")
        TokenRecycling(model, warm=True)
        forwards.clear()
        model.lm_head.weight.data *= 1.01
        assert TokenRecycling(model, warm=True).warm_rows.computed == VOCABULARY
        assert forwards

    def test_a_larger_k_serves_a_smaller_one_and_not_the_reverse(self, forwards):
        target = target_of()
        warm_up(target, None, 12)
        forwards.clear()
        cut = warm_up(target, None, 5)
        assert forwards == []
        direct = AdjacencyMatrix(VOCABULARY, 5)
        fill(target, direct)
        # The logits of token 0, the padding, are all equal.
        assert torch.equal(cut.rows.candidates[1:], direct.candidates[1:])
        assert torch.allclose(cut.rows.probabilities, direct.probabilities, atol=2e-3)
        assert warm_up(target, None, 13).computed == VOCABULARY

    @pytest.mark.usefixtures("clock")
    def test_a_partial_file_is_completed(self):
        target = target_of()
        part = warm_up(target, None, K, 1.5)
        assert (part.rows.rows_seen, part.complete) == (filling.FIRST_BATCH, False)
        assert warm_up(target, None, K, None).computed == 0  # not by default
        whole = warm_up(target, None, K, True)
        assert whole.computed == VOCABULARY - filling.FIRST_BATCH
        assert whole.complete
        assert whole.path == part.path
        again = warm_up(target, None, K, True)
        assert (again.computed, again.rows.rows_seen) == (0, VOCABULARY)

    def test_tokens_without_a_row_are_not_tried_again(self, forwards):
        target = target_of()
        target.model.get_input_embeddings().weight.data[7] = float("nan")
        assert warm_up(target, None, K).rows.rows_seen == VOCABULARY - 1
        forwards.clear()
        assert warm_up(target, None, K).complete
        assert forwards == []

    def test_force_computes_all_anew(self):
        target = target_of()
        warm_up(target, None, K)
        assert warm_up(target, None, K).computed == 0
        assert warm_up(target, None, K, force=True).computed == VOCABULARY

    def test_a_folder_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "file"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recycler = TokenRecycling(make("llama"), warm=True)
        assert recycler.matrix.rows_seen == VOCABULARY
        assert recycler.warm_rows.path is None
        assert "cannot write" in recycler.warm_rows.line

    @pytest.mark.parametrize("damage", ["bytes", "empty", "format", "ids", "context", "vocabulary"])
    def test_a_damaged_file_costs_one_warning(self, damage):
        target = target_of()
        path = warm_up(target, None, K).path
        tensors = load_file(path)
        about = {
            "format": FORMAT, "context": "nothing", "context_tokens": "[]",
            "complete": "true", "questions": "0", "answered": "0",
        }  # fmt: skip
        if damage == "bytes":
            path.write_bytes(b"x" * 100)
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            if damage == "format":
                about["format"] = "another"
            elif damage == "ids":
                tensors["candidates"][3, 0] = VOCABULARY
            elif damage == "context":
                about["context_tokens"] = f"[{VOCABULARY}]"
            else:
                tensors = {name: tensor[1:].clone() for name, tensor in tensors.items()}
            save_file(tensors, path, metadata=about)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            again = warm_up(target, None, K)
        assert len(found) == 1
        assert "warm rows are ignored" in str(found[0].message)
        assert (again.computed, again.path) == (VOCABULARY, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert warm_up(target, None, K).computed == 0

    def test_the_context_is_recorded_and_used_again(self, monkeypatch, clock):
        target = target_of()
        bos = contexts.WarmPrefix("bos", (1,))
        monkeypatch.setattr("token_recycling.warm.start.choose", lambda *a: (bos, {}))
        assert warm_up(target, letters(), K, 3.5).context.name == "bos"
        monkeypatch.delattr("token_recycling.warm.start.choose")
        whole = warm_up(target, letters(), K)
        assert (whole.context.name, whole.complete) == ("bos", True)
        expected, _ = filled(target, prefix=(1,))
        assert torch.allclose(whole.rows.probabilities, expected.probabilities, atol=2e-3)
        assert whole.rows.fingerprint


class TestRecycler:
    @pytest.mark.parametrize("name", SUPPORTED)
    def test_the_text_is_that_of_plain_decoding(self, name):
        recycler = TokenRecycling(make(name), warm=True)
        assert recycler.matrix.rows_seen == VOCABULARY
        answer = recycler.generate(PROMPT, max_new_tokens=40)
        assert answer.token_ids == plain(recycler.model, PROMPT, 40)

    def test_the_first_answer_of_the_bundled_model_takes_fewer_steps(self, bundled):
        cold = TokenRecycling(bundled.model, bundled.tokenizer, nodes=16, warm=False)
        warm = TokenRecycling(bundled.model, bundled.tokenizer, nodes=16, warm=True)
        steps = []
        for recycler in (cold, warm):
            answer = recycler.generate("The king and the queen", max_new_tokens=60)
            steps.append(answer.stats.steps)
        assert steps[1] < steps[0]

    @pytest.mark.usefixtures("automatic")
    def test_small_models_are_filled_by_default(self):
        assert TokenRecycling(make("llama")).matrix.rows_seen == VOCABULARY
        assert enable(make("gpt2")).matrix.rows_seen == VOCABULARY

    @pytest.mark.usefixtures("automatic")
    @pytest.mark.parametrize(
        "options",
        [
            {"warm": False},
            {"drafter": "paper"},
            {"drafter": "prompt-lookup"},
            {"drafter": "none"},
            {"drafter": AdaptiveDrafter(AdjacencyMatrix(VOCABULARY, K))},
        ],
    )
    def test_what_starts_cold(self, options, forwards):
        warm_up(target_of(), None, K)
        forwards.clear()
        recycler = TokenRecycling(make("llama"), **options)
        assert (recycler.warm_rows, recycler.matrix.rows_seen, forwards) == (None, 0, [])

    def test_any_drafter_if_asked_for(self):
        drafter = AdaptiveDrafter(AdjacencyMatrix(VOCABULARY, K))
        for given in ("paper", drafter):
            recycler = TokenRecycling(make("llama"), drafter=given, warm=True)
            assert recycler.matrix.rows_seen == VOCABULARY
            answer = recycler.generate(PROMPT, max_new_tokens=30)
            assert answer.token_ids == plain(recycler.model, PROMPT, 30)
        assert drafter.matrix.rows_seen == VOCABULARY

    @pytest.mark.usefixtures("automatic")
    def test_slow_models_are_not_filled_by_default(self, monkeypatch, forwards):
        monkeypatch.setattr("token_recycling.warm.start._tokens_per_second", lambda target: 1.0)
        assert TokenRecycling(make("llama")).matrix.rows_seen == 0
        assert forwards == []
        monkeypatch.setattr(defaults, "WARM_TOKENS", 60)  # what a minute gives
        assert TokenRecycling(make("llama")).warm_rows.computed == VOCABULARY

    def test_a_matrix_of_ones_own_keeps_its_rows(self):
        matrix = AdjacencyMatrix(VOCABULARY, 5)
        matrix.update(torch.tensor([4]), torch.arange(5)[None], torch.full((1, 5), 0.2))
        recycler = TokenRecycling(make("llama"), matrix=matrix, warm=True)
        assert recycler.matrix.candidates[4].tolist() == [0, 1, 2, 3, 4]
        assert recycler.matrix.rows_seen == VOCABULARY
        assert recycler.warm_rows.rows.candidates[4].tolist() != [0, 1, 2, 3, 4]

    def test_reset_returns_to_the_warm_state(self):
        recycler = TokenRecycling(make("llama"), nodes=8, warm=True)
        rows = recycler.matrix.clone()
        first = recycler.generate(PROMPT, max_new_tokens=30).stats.steps
        assert not same(recycler.matrix, rows)
        assert recycler.matrix.pairs_seen
        recycler.reset()
        assert same(recycler.matrix, rows)
        assert recycler.matrix.pairs_seen == 0
        assert recycler.generate(PROMPT, max_new_tokens=30).stats.steps == first

    @pytest.mark.parametrize(
        "twin", [copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))]
    )
    def test_copies_keep_the_rows(self, twin, forwards):
        recycler = TokenRecycling(make("llama"), warm=True)
        rows = recycler.matrix.clone()
        forwards.clear()
        other = twin(recycler)
        assert same(other.matrix, rows)
        other.generate(PROMPT, max_new_tokens=20)
        assert same(recycler.matrix, rows)
        other.reset()
        assert same(other.matrix, rows)
        assert forwards == []

    @pytest.mark.parametrize("name", REFUSED[:2])
    def test_a_model_decoded_plainly_is_not_filled(self, name, forwards):
        with pytest.warns(PlainDecodingWarning):
            recycler = TokenRecycling(make(name), warm=True)
        assert isinstance(recycler.target, PlainTarget)
        assert (recycler.warm_rows, forwards) == (None, [])

    def test_a_model_that_fails_goes_on_cold_after_one_warning(self, monkeypatch, folder):
        def fails(self, tokens, **options):
            raise RuntimeError("no room")

        monkeypatch.setattr(TreeTarget, "read_independent", fails)
        with pytest.warns(UserWarning, match="warm rows are not computed: RuntimeError: no room"):
            recycler = TokenRecycling(make("llama"), warm=True)
        with pytest.warns(UserWarning, match="no room"):
            TokenRecycling(make("llama"), letters(), warm=True)  # while choosing a context
        assert recycler.matrix.rows_seen == 0
        assert not folder.exists()
        answer = recycler.generate(PROMPT, max_new_tokens=20)
        assert answer.token_ids == plain(recycler.model, PROMPT, 20)

    def test_a_model_in_training_with_dropout_is_not_filled(self, forwards):
        model = make("gpt2", attn_pdrop=0.2, resid_pdrop=0.2).train()
        assert TokenRecycling(model, warm=True).matrix.rows_seen == 0
        assert forwards == []

    def test_more_on_request(self):
        recycler = TokenRecycling(make("llama"), nodes=8, warm=None)
        assert recycler.warm_rows.rows.rows_seen == 0
        cold = recycler.generate(PROMPT, max_new_tokens=30)
        recycler.reset()
        stops = iter([False, False, False, True])
        part = recycler.warm(stop=lambda: next(stops))
        assert part is recycler.warm_rows
        assert 0 < part.rows.rows_seen == recycler.matrix.rows_seen < VOCABULARY
        again = recycler.generate(PROMPT, max_new_tokens=30)
        assert again.token_ids == cold.token_ids
        assert recycler.warm().complete
        assert recycler.matrix.rows_seen == VOCABULARY
        recycler.reset()
        assert recycler.matrix.rows_seen == VOCABULARY
        assert recycler.generate(PROMPT, max_new_tokens=30).token_ids == cold.token_ids
        assert TokenRecycling(make("llama")).warm_rows.computed == 0
        assert TokenRecycling(make("llama")).matrix.rows_seen == VOCABULARY

    def test_a_conversation_goes_on_after_it(self, forwards):
        recycler = TokenRecycling(make("llama"), nodes=8)
        first = recycler.generate(PROMPT, max_new_tokens=20, keep_context=True)
        longer = [*PROMPT, *first.token_ids, 7, 8]
        assert recycler.warm(60.0).complete
        assert forwards
        answer = recycler.generate(longer, max_new_tokens=20, keep_context=True)
        assert answer.stats.prompt_tokens < len(longer)
        assert answer.token_ids == plain(recycler.model, longer, 20)

    def test_an_answer_waits_for_no_more_than_a_batch(self):
        recycler = TokenRecycling(make("llama"), nodes=8)
        asked, begun = Event(), Event()

        def stop():
            begun.set()
            return asked.wait(0.2)

        thread = Thread(target=recycler.warm, kwargs={"stop": stop})
        thread.start()
        assert begun.wait(30)
        asked.set()
        answer = recycler.generate(PROMPT, max_new_tokens=20)
        assert answer.token_ids == plain(recycler.model, PROMPT, 20)
        thread.join(30)
        assert not thread.is_alive()
        assert recycler.warm_rows.rows.rows_seen < VOCABULARY

    def test_frequent_tokens_come_first(self, monkeypatch):
        monkeypatch.setattr(contexts, "TEXTS", ("cab cab c",))
        tokenizer = letters()
        [c], [a], [b] = (tokenizer(x, add_special_tokens=False).input_ids for x in "cab")
        assert [x for x in contexts.frequent_tokens(tokenizer) if x in (a, b, c)] == [c, a, b]
        assert contexts.frequent_tokens(None) == []
        recycler = TokenRecycling(make("llama"), tokenizer)
        assert recycler.warm_rows.rows.rows_seen == 0
        monkeypatch.setattr("token_recycling.warm.start.choose", lambda *_: (contexts.NOTHING, {}))
        monkeypatch.setattr(filling, "STOPPABLE_BATCH", len(tokenizer.all_special_ids) + 2)
        stops = iter([False, True])
        recycler.warm(stop=lambda: next(stops))
        assert bool(recycler.matrix.seen(torch.tensor([c])).all())
        assert not bool(recycler.matrix.seen(torch.tensor([VOCABULARY - 1])).any())

    def test_an_interruption_keeps_what_was_computed(self, monkeypatch):
        read = TreeTarget.read_independent
        calls = iter(range(100))

        def interrupted(self, *args, **options):
            if next(calls) == 1:
                raise KeyboardInterrupt
            return read(self, *args, **options)

        monkeypatch.setattr(TreeTarget, "read_independent", interrupted)
        target = target_of()
        with pytest.raises(KeyboardInterrupt):
            warm_up(target, None, K)
        kept = kept_rows(target, None, K)
        assert (kept.rows.rows_seen, kept.complete) == (filling.FIRST_BATCH, False)
        assert warm_up(target, None, K).computed == VOCABULARY - filling.FIRST_BATCH

    def test_rows_are_kept_every_minute(self, monkeypatch, clock):
        written = []
        monkeypatch.setattr(
            WarmRows, "keep", lambda rows, model: written.append(rows.rows.rows_seen)
        )
        monkeypatch.setattr("token_recycling.warm.start.KEEP_SECONDS", 0.0)
        monkeypatch.setattr(filling, "FIRST_BATCH", 16)
        warm_up(target_of(), None, K)
        assert len(written) > 2
        assert written == sorted(written)

    @pytest.mark.parametrize("warm", ["yes", 0.0, -1, float("nan"), [1]])
    def test_a_wrong_value_is_refused(self, warm):
        with pytest.raises(TokenRecyclingError, match=r"give True, False, None or seconds above 0"):
            TokenRecycling(make("llama"), warm=warm)

    def test_progress_and_line(self):
        seen = []
        recycler = TokenRecycling(
            make("llama"), warm=5.0, on_progress=lambda *counts: seen.append(counts)
        )
        assert seen[-1] == (VOCABULARY, VOCABULARY)
        line = recycler.warm_rows.line
        assert line.startswith("warm rows: 96 of 96 tokens, 96 computed in ")
        assert line.endswith(str(recycler.warm_rows.path))


@pytest.fixture
def checkpoint(tmp_path):
    make("llama").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def made(source, drafter="adaptive", **options):
    given = ServingOptions(drafter=drafter, **options)
    return given.make(VOCABULARY, 8, "cpu", checkpoint=str(source)).matrix


class TestEngines:
    def loaded(self, folder):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def test_they_find_the_rows_of_a_checkpoint(self, checkpoint, tmp_path, forwards):
        assert made(checkpoint).rows_seen == 0  # nothing is computed
        recycler = TokenRecycling(self.loaded(checkpoint), warm=True)
        forwards.clear()
        assert same(made(checkpoint), recycler.matrix)
        assert made(checkpoint, candidates=4).rows_seen == VOCABULARY
        moved = shutil.copytree(checkpoint, tmp_path / "elsewhere")
        assert same(made(moved), recycler.matrix)
        assert forwards == []

    def test_rows_kept_for_a_model_without_a_name_are_found_once_its_files_are_loaded(
        self, checkpoint
    ):
        nameless = self.loaded(checkpoint)
        nameless.config._name_or_path = ""
        TokenRecycling(nameless, warm=True)
        assert made(checkpoint).rows_seen == 0
        assert TokenRecycling(self.loaded(checkpoint)).warm_rows.computed == 0
        assert made(checkpoint).rows_seen == VOCABULARY

    def test_not_those_of_other_weights(self, checkpoint, tmp_path):
        TokenRecycling(self.loaded(checkpoint), warm=True)
        other = make("llama")
        other.model.layers[1].mlp.up_proj.weight.data *= 1.01
        other.save_pretrained(tmp_path / "tuned")
        assert made(tmp_path / "tuned").rows_seen == 0

    def test_not_for_other_drafters_or_unknown_models(self, checkpoint):
        TokenRecycling(self.loaded(checkpoint), warm=True)
        assert made(checkpoint, "paper").rows_seen == 0
        for source in ("", "no/such-model", "::", checkpoint / "missing"):
            assert made(source).rows_seen == 0

    def test_a_matrix_from_a_file_keeps_its_rows(self, checkpoint, tmp_path):
        TokenRecycling(self.loaded(checkpoint), warm=True)
        own = AdjacencyMatrix(VOCABULARY, K)
        own.update(torch.tensor([4]), torch.arange(K)[None], torch.full((1, K), 0.2))
        own.save(tmp_path / "m")
        matrix = made(checkpoint, matrix=str(tmp_path / "m"))
        assert matrix.candidates[4].tolist() == list(range(K))
        assert matrix.rows_seen == VOCABULARY

    def test_a_damaged_alias_costs_a_warning(self, checkpoint, folder):
        TokenRecycling(self.loaded(checkpoint), warm=True)
        [alias] = folder.glob("alias-*")
        alias.write_text("{")
        with pytest.warns(UserWarning, match="warm rows are ignored"):
            assert made(checkpoint).rows_seen == 0

    def test_another_vocabulary_is_not_served(self, checkpoint):
        TokenRecycling(self.loaded(checkpoint), warm=True)
        with pytest.warns(UserWarning, match="warm rows are ignored"):
            drafter = ServingOptions().make(100, 8, "cpu", checkpoint=str(checkpoint))
        assert drafter.matrix.rows_seen == 0

    def test_a_snapshot_of_the_hub(self, checkpoint, monkeypatch):
        recycler = TokenRecycling(self.loaded(checkpoint), warm=True)
        monkeypatch.setattr(
            "huggingface_hub.try_to_load_from_cache",
            lambda name, file, revision: str(checkpoint / file) if name == "a/b" else None,
        )
        assert same(made("a/b"), recycler.matrix)
        assert made("a/c").rows_seen == 0

    def test_a_model_made_in_memory_has_no_alias(self, folder):
        TokenRecycling(make("llama"), warm=True)
        assert list(folder.glob("alias-*")) == []
        assert store.keep_alias(SimpleNamespace(config=SimpleNamespace()), "name") is None
