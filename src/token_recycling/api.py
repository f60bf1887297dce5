"""The front door: a model, its tokenizer and what was recycled so far."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling import defaults
from token_recycling.accept import (
    Acceptor,
    FollowAcceptor,
    GreedyAcceptor,
    Stop,
    ordinary_tensors,
)
from token_recycling.adjacency import AdjacencyMatrix, fingerprint
from token_recycling.costs import CostCurve, find
from token_recycling.decode import decode
from token_recycling.drafters import BudgetDrafter, Drafter, NoDrafter, make_drafter
from token_recycling.draws import RowDraws
from token_recycling.engine import FusedEngine, FusingError, can_fuse
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.integrations.criteria import CriteriaRules, looks_at_batch
from token_recycling.integrations.request import Request, asks_for_row, row_by_row
from token_recycling.integrations.transformers import generate, mend
from token_recycling.kept import KeptContext
from token_recycling.metrics import Stats, Step
from token_recycling.plain_target import PlainTarget
from token_recycling.probe import open_target
from token_recycling.sampling import REFUSED, generate_options, prepare
from token_recycling.stop import StopRules
from token_recycling.target import OnProgress, TreeTarget, check_prompts
from token_recycling.text import Prompt, TextStream, encode, is_batch
from token_recycling.tree import TreeTemplate
from token_recycling.turns import Turns
from token_recycling.unwrap import model_inside

BUNDLED_MODEL = Path(__file__).parent / "model"
ENGINES = ("auto", "fused", "readable")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
TOKENIZER_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "trust_remote_code")


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: all emitted tokens, an end-of-sequence token included.
        finish_reason: "eos", "stop" (a stop string) or "length" (a limit).
        stats: what it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """One token of a streamed answer.

    Attributes:
        text: what the token adds; empty while a character or a stop string is incomplete.
        token_id: the token.
        from_draft: True when the token was drafted and accepted. The last token of every step
            counts as the target's own.
        finish_reason: set on the last chunk (see ``Generation``).
        stats: set on the last chunk.
    """

    text: str
    token_id: int
    from_draft: bool
    finish_reason: str | None = None
    stats: Stats | None = None


@dataclass
class _Run:
    """A batch on its way: what to iterate, and what has come so far."""

    steps: Generator[Step, None, None]
    prompts: list[list[int]]
    readers: list[TextStream] | None
    on_step: Callable[[Step], None] | None = None
    kept: int = 0  # prompt tokens that need not be read
    tokens: list[list[int]] = field(init=False)
    stats: list[Stats] = field(init=False)
    reasons: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.prompts]
        self.stats = [Stats() for _ in self.prompts]
        self.reasons = [None] * len(self.prompts)

    def take(self, step: Step) -> None:
        """Record a step."""
        for row, prompt in enumerate(self.prompts):
            if self.tokens[row]:
                self.stats[row].add(step, row)
            else:
                self.stats[row].add_prefill(len(prompt) - self.kept, step, row)
            self.tokens[row] += step.tokens[row]
            self.reasons[row] = self.reasons[row] or step.reasons[row]
        if self.on_step is not None:
            self.on_step(step)


class TokenRecycling:
    """A model that decodes several tokens per forward, without a change in any of them.

    The adjacency matrix in ``matrix`` is kept from call to call (hot start); ``reset`` forgets
    it. One answer at a time: calls of other threads wait for their turn, and a stream that is gone
    on with after another answer has begun raises. A copy or a pickle is independent; it has what
    was learnt, and no context.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafter: str | Drafter = defaults.DRAFTER,
        tree: str | Path | TreeTemplate | None = None,
        k: int | None = None,
        matrix: AdjacencyMatrix | str | Path | None = None,
        costs: CostCurve | None = None,
        engine: str = defaults.ENGINE,
        exact_logits: bool = False,
        queue: bool = True,
        strict: bool = False,
    ) -> None:
        """Wrap a model that is already loaded.

        Args:
            model: a Transformers ``…ForCausalLM``, or what has one inside: a pipeline, a model of
                peft, … Its ``generate`` learns to pass streamers and tokenizers on to
                ``custom_generate``, and some of its linear layers to compute in another way for a
                recycler's forwards; to everybody else it is what it was.
            tokenizer: its tokenizer; without one, prompts are token ids and answers have no text.
            drafter: "adaptive", "paper", "prompt-lookup", "none", a registered name, or an object.
            tree: "auto": as many nodes as pay, chosen while decoding; or a shipped tree,
                "ranked-N", "chain-N", a JSON file or a template. None: "auto".
            k: candidates kept per token; None: 8, or those of ``matrix``.
            matrix: to start from, or the file of one.
            costs: what steps cost here, for an automatic tree. None: what ``token-recycling tune``
                measured for this model and machine, else a guess; steps correct both.
            engine: "fused": a step is compiled and, on a GPU, replayed as one graph; what that
                cannot hold goes through the readable loop, with the same output. "readable":
                never. "auto": fused on CUDA.
            exact_logits: compute the last projection in float32, for models in half precision:
                rounded logits tie, and ties fall by chance (see ``exact.ExactHead``).
            queue: calls from several threads wait for each other, in their order. False: while one
                is answered, ``generate`` of an enabled model decodes others plainly, and other
                calls raise.
            strict: raise, instead of warning and decoding plainly, when the model cannot be
                verified by tree attention.

        Raises:
            TokenRecyclingError: tree, drafter, k or matrix do not fit.
        """
        self.model, self.tokenizer = model_inside(model), tokenizer
        model = self.model
        if isinstance(drafter, Drafter):
            matrix = getattr(drafter, "matrix", None) or matrix
        elif not isinstance(drafter, str):
            raise TokenRecyclingError("a drafter is a name or an object of a Drafter class")
        if not (k is None or (isinstance(k, Integral) and not isinstance(k, bool))):
            raise TokenRecyclingError(f"k is {k!r}; it must be a whole number")
        if not (matrix is None or isinstance(matrix, str | Path | AdjacencyMatrix)):
            raise TokenRecyclingError(f"matrix is {matrix!r}; give an AdjacencyMatrix or its file")
        if isinstance(matrix, str | Path):
            with ordinary_tensors():
                matrix = AdjacencyMatrix.load(matrix)
        if engine not in ENGINES:
            raise TokenRecyclingError(f"engine is {engine!r}; choose one of {', '.join(ENGINES)}")
        if matrix is not None and k is not None and k != matrix.k:
            raise TokenRecyclingError(f"the matrix keeps k={matrix.k} candidates, not {k}")
        k = matrix.k if matrix else defaults.CANDIDATES if k is None else k
        tree = defaults.TREE if tree is None else tree
        automatic = tree == defaults.TREE
        template = _ranked(k) if automatic else _template(tree, k)

        self.target = open_target(model, strict=strict, exact_logits=exact_logits)
        name = fingerprint(tokenizer, self.target.vocab_size)
        self.template = template
        with ordinary_tensors():  # the caller may be in inference mode, and later not
            if matrix is None:
                matrix = AdjacencyMatrix(self.target.vocab_size, k, fingerprint=name)
            matrix.check(self.target.vocab_size, name, what="this model")
            self.matrix = matrix.to(self.target.device)
            if isinstance(self.target, PlainTarget):
                drafter = NoDrafter()
            elif isinstance(drafter, str):
                drafter = make_drafter(drafter, self.matrix, template)
                if automatic and drafter.shares:
                    device = self.target.device
                    drafter = BudgetDrafter(drafter, costs or find(model, device), device)
        self.drafter = drafter
        self.engine = engine
        # Entered while a step is compiled, which takes a minute or more the first time.
        self.compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._fused: FusedEngine | None = None
        self.strict, self.exact_logits = strict, exact_logits
        self.stats = Stats()  # of all answers, added up
        self.warned: set[str] = set()  # why calls of generate were decoded plainly
        self.turns, self.queue = Turns(), queue
        self._context: KeptContext | None = None  # what the target has read of a single row
        self._runs = 0  # begun so far; only the last one may go on
        mend(model)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins without a context and without compiled steps."""
        return {**self.__dict__, "_fused": None, "_context": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        mend(self.model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        drafter: str | Drafter = defaults.DRAFTER,
        tree: str | Path | TreeTemplate | None = None,
        k: int | None = None,
        matrix: AdjacencyMatrix | str | Path | None = None,
        costs: CostCurve | None = None,
        engine: str = defaults.ENGINE,
        exact_logits: bool = False,
        queue: bool = True,
        strict: bool = False,
        **model_options: Any,
    ) -> TokenRecycling:
        """Load a model and its tokenizer.

        Args:
            name_or_path: a checkpoint; None: the small model that comes with the package.
            device: where to put it; None: an accelerator if there is one. Leave it out with
                ``device_map``.
            dtype: None: float32 on a CPU and for the bundled model, else the checkpoint's own.
            drafter: see ``__init__``.
            tree: see ``__init__``.
            k: see ``__init__``.
            matrix: see ``__init__``.
            costs: see ``__init__``.
            engine: see ``__init__``.
            exact_logits: see ``__init__``.
            queue: see ``__init__``.
            strict: see ``__init__``.
            **model_options: passed to ``AutoModelForCausalLM.from_pretrained`` as they are:
                ``device_map``, ``quantization_config``, ``attn_implementation``, …

        Raises:
            TokenRecyclingError: the checkpoint cannot be loaded, or see ``__init__``.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = str(BUNDLED_MODEL if name_or_path is None else name_or_path)
        local = path.startswith(("/", ".", "~")) or Path(path).exists()
        if not path or (local and not Path(path).is_dir()):
            raise TokenRecyclingError(f"cannot load the model {path!r}: there is no such folder")
        if device is None and "device_map" not in model_options:
            device = _best_device()
        if device is not None:
            try:
                torch.zeros(1, device=device).item()
            except Exception as error:
                line = str(error).strip().split("\n")[0]
                raise TokenRecyclingError(f"device {device} cannot be used: {line}") from error
        on_cpu = device is not None and torch.device(device).type == "cpu"
        if dtype is None:
            dtype = torch.float32 if on_cpu or name_or_path is None else "auto"
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise TokenRecyclingError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **model_options)
            shared = {k: v for k, v in model_options.items() if k in TOKENIZER_OPTIONS}
            tokenizer = AutoTokenizer.from_pretrained(path, **shared)
            if device is not None and model.device.type != torch.device(device).type:
                model.to(device)  # a quantised model may refuse even to stay where it is
        except Exception as error:  # whatever a broken checkpoint makes the libraries raise
            line = one_line(error, 300)
            raise TokenRecyclingError(f"cannot load the model {path}: {line}") from error
        return cls(
            model.eval(),
            tokenizer,
            drafter=drafter,
            tree=tree,
            k=k,
            matrix=matrix,
            costs=costs,
            engine=engine,
            exact_logits=exact_logits,
            queue=queue,
            strict=strict,
        )

    def reset(self) -> None:
        """Forget everything recycled (cold start), and the context."""
        self.matrix.reset()
        self.forget_context()

    def forget_context(self) -> None:
        """Free the KV cache; an answer that is not finished cannot go on."""
        self.target.reset()
        self._context = None
        self._runs += 1

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Any
    ) -> Generation | list[Generation]:
        """Answer a prompt, or a list of prompts as one batch.

        Args:
            prompt: a text, a conversation (list of messages), token ids, or a list of these.
            **options: those of ``stream``.

        Returns:
            A ``Generation``, or a list of them for a list of prompts.

        Raises:
            TokenRecyclingError: a prompt or an option cannot be used.
        """
        batch = is_batch(prompt)
        prompts: Any = list(prompt) if batch else [prompt]
        run = self._start(prompts, stream=False, **options)
        with self._turn(), closing(run.steps) as steps:
            for step in steps:
                run.take(step)
        answers = []
        for row, tokens in enumerate(run.tokens):
            if run.readers is not None:
                run.readers[row].finish()
                text = run.readers[row].text
            elif self.tokenizer is None:
                text = ""
            else:
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            answers.append(Generation(text, tokens, run.reasons[row] or "", run.stats[row]))
        return answers if batch else answers[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Answer a prompt token by token.

        The caller may stop iterating at any time: matrix and context stay valid.

        Args:
            prompt: a text, a conversation (list of messages) or token ids.
            **options: ``max_new_tokens`` (default 256); ``temperature`` (default 0: greedy),
                ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and any other option of
                ``generate`` that makes a logits processor, each with the meaning and the default
                that it has there; ``seed`` (None: PyTorch's own random state); ``stop``, a list
                of strings; ``keep_context``, to go on from the common beginning with the
                previous call instead of reading the prompt anew; ``on_progress``, called with
                (prompt tokens read, prompt tokens); ``on_step``, called with every ``Step``, the
                prefill's first.

        Yields:
            One ``Chunk`` per token.

        Raises:
            TokenRecyclingError: the prompt or an option cannot be used.
        """
        run = self._start([prompt], stream=True, **options)
        return self._chunks(run)

    def _chunks(self, run: _Run) -> Iterator[Chunk]:
        assert run.readers is not None
        reader = run.readers[0]
        with closing(run.steps) as steps:  # at once, not when the garbage is collected
            while True:
                with self._turn():
                    step = next(steps, None)
                if step is None:
                    return
                first = not run.tokens[0]
                begin = len(run.tokens[0])
                run.take(step)
                reason = run.reasons[0]
                if reason is not None:
                    reader.finish()
                tokens = step.tokens[0]
                for index, token in enumerate(tokens):
                    last = index == len(tokens) - 1
                    yield Chunk(
                        reader.pieces[begin + index],
                        token,
                        from_draft=not first and not last,
                        finish_reason=reason if last else None,
                        stats=run.stats[0] if last and reason is not None else None,
                    )

    def _start(
        self,
        prompts: list[Prompt],
        *,
        stream: bool,
        max_new_tokens: int = defaults.MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        keep_context: bool = False,
        on_progress: OnProgress | None = None,
        on_step: Callable[[Step], None] | None = None,
        **processors: Any,
    ) -> _Run:
        if not prompts:
            raise TokenRecyclingError("there is no prompt")
        for name in REFUSED.keys() & processors.keys():
            raise TokenRecyclingError(f"{name} is no option here; {REFUSED[name]}")
        given = generate_options(
            max_new_tokens=max_new_tokens, temperature=temperature, **processors
        )
        stop = _stop_strings(stop)
        if seed is not None:
            if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
                raise TokenRecyclingError(f"seed is {seed}; it must be a whole number below 2^63")
            seed = int(seed)
        for name, call in (("on_step", on_step), ("on_progress", on_progress)):
            if call is not None and not callable(call):
                raise TokenRecyclingError(f"{name} is {call!r}; it must be a function")
        if stop and self.tokenizer is None:
            raise TokenRecyclingError("stop strings need a tokenizer")
        encoded = [encode(self.tokenizer, prompt) for prompt in prompts]
        self._check_ids(encoded)
        requests = [prepare(self.model, self.tokenizer, prompt, given) for prompt in encoded]
        if reason := _looks_across(requests):
            raise TokenRecyclingError(f"this call cannot be recycled: {reason}; use one prompt")
        accept: Acceptor
        if all(request.is_plain_greedy for request in requests):
            accept = GreedyAcceptor()
        else:
            accept = FollowAcceptor(
                encoded,
                [request.processors for request in requests],
                RowDraws(self._generators(seed, len(encoded))) if temperature else None,
                self.target.device,
            )
        room = self.target.max_context
        most = given["max_new_tokens"]
        limits = [most if room is None else min(most, room - len(prompt)) for prompt in encoded]
        readers = None
        if stream or stop:
            readers = [TextStream(self.tokenizer, stop) for _ in encoded]
        run = _Run(_nothing(), encoded, readers, on_step)
        criteria = [
            CriteriaRules(request.criteria, request.rows(), self.target.device)
            for request in requests
        ]
        rules = StopRules(limits, self._special_ids(stop), readers, criteria)

        def keep() -> int:  # asked when decoding begins: the context may change until then
            run.kept = self._common_context(encoded) if keep_context else 0
            return run.kept

        steps = self.steps(encoded, accept, rules, keep=keep, on_progress=on_progress)
        run.steps = self._remembered(steps, encoded)
        return run

    def steps(
        self,
        prompts: list[list[int]],
        accept: Acceptor,
        rules: Stop,
        *,
        keep: Callable[[], int] = lambda: 0,
        on_progress: OnProgress | None = None,
    ) -> Iterator[Step]:
        """Decode with an acceptor and stop rules of the caller's; see ``decode``.

        Nothing happens before the first step. ``keep`` is called then, for the number of tokens
        of a single prompt that the target has read before.

        Raises:
            TokenRecyclingError: a prompt cannot be read, or another answer was begun meanwhile.
        """
        self._runs += 1
        own = self._runs

        def check() -> None:
            if self._runs != own:
                raise TokenRecyclingError(
                    "this answer cannot go on: the model has begun another one, or was reset"
                )

        kept = keep()
        self._context = None
        steps = decode(
            self.target,
            self.drafter,
            accept,
            prompts,
            rules,
            engine=self._engine(accept),
            keep=kept,
            on_progress=on_progress,
            check=check,
        )
        read = False
        for step in steps:
            for row, prompt in enumerate(prompts):
                if read:
                    self.stats.add(step, row)
                else:
                    self.stats.add_prefill(len(prompt) - kept, step, row)
            read = True
            yield step

    def _engine(self, accept: Acceptor) -> FusedEngine | None:
        """Return what takes the steps with ``accept``, or None: the readable loop."""
        wanted = self.engine == "fused" or (
            self.engine == "auto" and self.target.device.type == "cuda"
        )
        if not (wanted and can_fuse(accept)):
            return None
        if not isinstance(self.target, TreeTarget):
            return None
        if self._fused is None or self._fused.given is not self.drafter:
            try:
                self._fused = FusedEngine(self.target, self.drafter, self.compiling)
            except FusingError:
                return None
        return self._fused

    def _remembered(
        self, steps: Iterator[Step], prompts: list[list[int]]
    ) -> Generator[Step, None, None]:
        """Note what the target reads of a single prompt, for ``keep_context``."""
        read: list[int] = []
        runs = self._runs + 1
        with suppress(GeneratorExit):  # a stream that nobody goes on with
            for step in steps:
                if len(prompts) == 1:
                    read = read or list(prompts[0])
                    read += step.tokens[0]
                yield step
        if read and self._runs == runs and isinstance(self.target, TreeTarget):
            self._context = KeptContext(self.target, read[:-1])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the turn of this thread.

        Raises:
            TokenRecyclingError: the model is answering, in this thread or while there is no queue.
        """
        with self.turns.turn(wait=self.queue) as mine:
            if not mine:
                raise TokenRecyclingError("the model is in the middle of another answer")
            yield

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        own_cache: bool = False,
        **inputs: Any,
    ) -> Any:
        """Serve ``model.generate(…, custom_generate=recycler)``; ``generate`` calls this.

        Returns:
            What ``generate`` returns without ``custom_generate``.

        Raises:
            TokenRecyclingError: the model is not the recycler's, or the call cannot be served
                and ``strict`` is set.
        """
        if model is not self.model:
            raise TokenRecyclingError("this recycler was made for another model object")
        request = Request.of_call(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            own_cache,
            **inputs,
        )
        return generate(self, request, streamer, inputs_tensor)

    def _special_ids(self, stop: list[str]) -> set[int]:
        """Ids of the stop strings that are special tokens; the text does not show those."""
        added = self.tokenizer.get_added_vocab() if stop else {}
        return {added[text] for text in stop if text in added}

    def _common_context(self, prompts: list[list[int]]) -> int:
        """Tokens at the beginning of a single prompt that need not be read again."""
        if len(prompts) != 1 or self._context is None:
            return 0
        return self._context.common(prompts[0][:-1])

    def _generators(self, seed: int | None, rows: int) -> list[torch.Generator | None]:
        """Row b of a batch draws as a single prompt with seed + b does."""
        if seed is None and rows == 1:
            return [None]
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        device = self.target.device
        return [torch.Generator(device).manual_seed(seed + row) for row in range(rows)]

    def _check_ids(self, prompts: list[list[int]]) -> None:
        check_prompts(prompts, self.target.max_context)
        for prompt in prompts:
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise TokenRecyclingError(
                    f"token ids must lie between 0 and {self.target.vocab_size - 1}"
                )


def _stop_strings(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list | tuple | set) or not all(
        isinstance(text, str) and text for text in strings
    ):
        raise TokenRecyclingError(
            f"stop is {stop!r}; it must be a text that is not empty, or a list"
        )
    return list(strings)


def _looks_across(requests: list[Request]) -> str | None:
    """Say why prompts decoded as a batch would not give what each gives alone, or None.

    Each prompt was prepared by itself, so only what the caller brought is shared by all.
    """
    first, *others = requests
    if not others:
        return None
    for criterion in first.criteria:
        if looks_at_batch(criterion):
            return f"{type(criterion).__name__} may look at the whole batch"
    brought = {id(processor) for processor in others[0].processors}
    for processor in first.processors:
        if asks_for_row(processor) or (id(processor) in brought and not row_by_row(processor)):
            return f"{type(processor).__name__} may look at the whole batch"
    return None


def _nothing() -> Generator[Step, None, None]:
    yield from ()


def _template(tree: str | Path | TreeTemplate, k: int) -> TreeTemplate:
    if not isinstance(tree, str | Path | TreeTemplate):
        raise TokenRecyclingError("a tree is a name, a file or a TreeTemplate")
    if not isinstance(tree, TreeTemplate):
        return TreeTemplate.load(tree, k)
    tree.check_k(k)
    return tree


def _ranked(k: int) -> TreeTemplate:
    """The tree that an automatic one is the beginning of."""
    ranked = TreeTemplate.load("ranked", k)
    return replace(ranked.first(min(defaults.MOST_NODES, len(ranked.paths))), name=defaults.TREE)


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
