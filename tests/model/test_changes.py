"""A model that somebody changes after it was loaded answers like ``generate``, or is refused."""

import contextlib
import warnings

import pytest
import torch

from model_changes import BY_NAME, MODEL, fresh, prepared, prompts
from serving import running
from token_recycling import TokenRecycling, enable
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.fingerprint import Fingerprint

TOKENS = 24
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0}


@pytest.fixture
def undo():
    functions = []
    yield functions
    for function in reversed(functions):
        function()


def outcome(call):
    """What a call returns, or the class of what it raises."""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except TokenRecyclingError as error:
            raise AssertionError(f"refused without a fallback: {error}") from error
        except Exception as error:
            return type(error)


def generated(generate, prompt, **options):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0} | options
    return outcome(lambda: generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())


def stock(model, prompt, **options):
    """What the model generates without us; the same class's methods are called."""
    return generated(lambda *a, **k: type(model).generate(model, *a, **k), prompt, **options)


def tokens(found, prompt):
    """The new tokens of a result of ``stock``."""
    return found if isinstance(found, type) else found[0][len(prompt) :]


def check(model, recycler, *, sampled=True):
    """Compare ``generate`` and ``recycler.generate`` with the stock method, for all prompts."""
    for prompt in prompts():
        right = stock(model, prompt)
        assert generated(model.generate, prompt) == right
        answer = outcome(lambda: recycler.generate(prompt, max_new_tokens=TOKENS).token_ids)  # noqa: B023
        assert answer == tokens(right, prompt)
        if sampled:
            assert generated(model.generate, prompt, **SAMPLED) == stock(model, prompt, **SAMPLED)


VALUES = ("written", "other_frequencies")  # weights change from one step to the next


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_after_a_change(name, undo):
    prepared(model := fresh(), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        enabled = enable(model)
        before = [stock(model, prompt) for prompt in prompts()]
        assert generated(model.generate, prompts()[0]) == before[0]
        stream = enabled.recycler.stream(prompts()[1], max_new_tokens=TOKENS)
        chunks = [next(stream).token_id for _ in range(3)]
    BY_NAME[name](model, undo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = None
        try:
            chunks += [chunk.token_id for chunk in stream]
        except TokenRecyclingError as error:
            refused = str(error)
        if refused is not None:
            assert "cannot continue" in refused
        elif name not in VALUES:  # it was decoded plainly, with what ``stock`` had too
            plain = getattr(enabled.recycler.target, "refused", True)
            assert plain or chunks == tokens(before[1], prompts()[1])
    check(model, enabled.recycler)
    enabled.disable()
    assert "generate" not in vars(model)


# Those whose text is wrong if nobody looks: what the others show, the kernels look at themselves.
SILENT = (
    "hook_at_the_last", "hook_of_means", "pre_hook", "forward_wrapped", "mixing_module",
    "switched_module", "nested_config", "activation", "variance_epsilon", "scaling", "transposed",
    "expanded", "class_forward", "rotary", "attention_function", "global_hook", "embedding_scaled",
)  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_without_the_fingerprint_they_would_be_wrong(name, undo, monkeypatch):
    """The control: nothing looks at the model again."""
    prepared(model := fresh(), name)
    with enable(model) as enabled, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated(model.generate, prompts()[0])
        monkeypatch.setattr(Fingerprint, "change", lambda self: None)
        BY_NAME[name](model, undo)
        with pytest.raises(AssertionError):
            check(model, enabled.recycler, sampled=False)


def test_the_server_follows(undo):
    """Each change, one after another, between requests and while one is answered."""
    for name in (
        "hook_at_the_last",
        "activation",
        "scaling",
        "expanded",
        "mixing_module",
        "rotary",
    ):
        prepared(model := fresh(), name)
        recycler = TokenRecycling(model, _tokenizer())
        body = {"model": "demo", "prompt": prompts()[0], "max_tokens": TOKENS, "temperature": 0}
        with running(recycler) as server, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server.post("/v1/completions", **body)
            BY_NAME[name](model, undo)
            for prompt in prompts():
                right = tokens(stock(model, prompt), prompt)
                answer = server.post("/v1/completions", **(body | {"prompt": prompt}))
                text = answer.json()["choices"][0]["text"]
                assert text == recycler.tokenizer.decode(right, skip_special_tokens=True), name
        while undo:
            undo.pop()()


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@contextlib.contextmanager
def counted(monkeypatch):
    """Count probes."""
    from token_recycling.model import probe as module

    calls, probe = [], module.probe
    with monkeypatch.context() as patch:
        patch.setattr(module, "probe", lambda target: calls.append(1) or probe(target))
        yield calls


def test_a_model_that_does_not_change_is_probed_once(monkeypatch):
    with counted(monkeypatch) as probes:
        recycler = TokenRecycling(fresh())
        text = prompts()[0]
        for _ in range(50):
            answer = recycler.generate(text, max_new_tokens=4, keep_context=True)
            text = [*text, *answer.token_ids, 5]
        assert len(probes) == 1
        recycler.model.model.layers[0].self_attn.scaling *= 2
        for _ in range(3):
            recycler.generate(text, max_new_tokens=4, keep_context=True)
        assert len(probes) == 2


def test_what_no_forward_reads_is_no_change(monkeypatch):
    model = fresh()
    with counted(monkeypatch) as probes, enable(model) as enabled:
        for n in range(3):
            model.generation_config.top_k = n + 1
            enable(model).disable()  # probes its own
            model.register_full_backward_hook(lambda *a: None)
            model.generate(torch.tensor([prompts()[0]]), max_new_tokens=4, do_sample=False)
        assert len(probes) == 4
        assert enabled.recycler.target.adoptions == 1


def test_strict_refuses_by_name():
    model = fresh()
    with enable(model, strict=True) as enabled:
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *a: None)
        with pytest.raises(TokenRecyclingError, match=r"model\.model\.layers\.1\.mlp got the hook"):
            enabled.recycler.generate(prompts()[0], max_new_tokens=4)
        handle.remove()
        enabled.recycler.generate(prompts()[0], max_new_tokens=4)


@pytest.mark.parametrize("change", ["adapters", "autocast"])
def test_batch_invariance_is_decided_again(change):
    """Sampled texts in bfloat16 are those of no drafts wherever the answer says so."""
    model = fresh().to(torch.bfloat16)
    recyclers = [TokenRecycling(model, nodes=12), TokenRecycling(model, drafter="none")]
    assert all(recycler.batch_invariant for recycler in recyclers)
    for recycler in recyclers:
        recycler.generate(prompts()[0], max_new_tokens=4)
    context = contextlib.nullcontext()
    if change == "autocast":
        context = torch.autocast("cpu", dtype=torch.bfloat16)
    else:
        BY_NAME[change](model, [])
        model.to(torch.bfloat16)
    with context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}
        answers = [recycler.generate(prompts()[1], **options) for recycler in recyclers]
    assert not any(answer.batch_invariant for answer in answers)
    if change == "autocast":
        again = recyclers[0].generate(prompts()[1], **options)
        assert again.batch_invariant
        assert recyclers[0].batch_invariant


@pytest.mark.parametrize("name", BY_NAME)
def test_after_disable_changes_do_what_they_do_without_us(name, undo):
    """Errors included."""
    prompt, outcomes = prompts()[0], []
    for used in (True, False):
        prepared(model := fresh(), name)
        if used:
            with warnings.catch_warnings(), enable(model) as enabled:
                warnings.simplefilter("ignore")
                enabled.recycler.generate(prompt, max_new_tokens=8)
        BY_NAME[name](model, undo)
        try:
            outcomes.append(stock(model, prompt, max_new_tokens=8))
        finally:
            while undo:
                undo.pop()()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("blind", [False, True])
def test_a_call_between_the_steps_of_a_stream_adopts_the_change(blind, monkeypatch):
    """The call falls back, so that no other answer begins; the control: nobody counts adoptions."""
    model = fresh()
    recycler = TokenRecycling(model, nodes=1)
    stream = recycler.stream(prompts()[0], max_new_tokens=TOKENS)
    next(stream)
    model.model.layers[0].self_attn.scaling *= 2
    with enable(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.tensor([prompts()[0]])
        options = {"num_beams": 2, "do_sample": False, "custom_generate": recycler}
        model.generate(ids, max_new_tokens=2, **options)
    assert recycler.target.adoptions == 2
    if blind:
        recycler.target.adoptions = 1
        assert len(list(stream)) == TOKENS - 1
    else:
        with pytest.raises(TokenRecyclingError, match="cannot continue: the model has changed"):
            list(stream)
