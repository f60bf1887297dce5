"""``TokenRecycling``, the main class: a model, its tokenizer and everything learnt so far."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from skinny_kernels.linear import FEW_TOKENS
from skinny_kernels.modes import RestoredModes, ordinary_tensors
from token_recycling import defaults
from token_recycling.checkpoint.load import load_checkpoint, planned
from token_recycling.decoding.answers import Chunk, Generation
from token_recycling.decoding.metrics import Stats
from token_recycling.decoding.teach import teach
from token_recycling.decoding.text import Batch, Prompt, is_batch
from token_recycling.decoding.warm_up import compile_kernels
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.matrix import AdjacencyMatrix, fingerprint
from token_recycling.drafting.size.auto import GRAPH_SIZES
from token_recycling.drafting.size.base import DraftSize
from token_recycling.errors import TokenRecyclingError, unknown_option
from token_recycling.graph.compilation import compile_ahead
from token_recycling.hf.call import Call, CallOptions, GenerateArguments, prepare_call
from token_recycling.hf.request import DecodingMethod, Request
from token_recycling.hf.serve import patch_generate, serve, warn_plain
from token_recycling.model.base import OnProgress
from token_recycling.model.probe import check_unchanged, open_target, probe_changes
from token_recycling.model.target import TreeTarget
from token_recycling.model.unwrap import model_inside
from token_recycling.options import OptionArguments, Options
from token_recycling.session import Session, Steps, drafter_and_size
from token_recycling.util.lock import FairLock

if TYPE_CHECKING:
    from typing_extensions import Unpack


logger = logging.getLogger(__name__)
WHOLE_CHECK = 16  # steps of a stream after which the whole model is compared


class TokenRecycling(DecodingMethod):
    """A model that decodes several tokens per forward, with the output of plain decoding.

    The adjacency matrix in ``matrix`` is kept between calls (hot start); ``reset`` removes all that
    was learnt from text.
    Only one answer is generated at a time: calls from other threads wait (see
    ``options.Options.queue``), and continuing a stream after another answer has begun raises. A
    copy or unpickled object is independent: it contains everything learnt, but no context.

    Attributes:
        model: the Transformers model.
        tokenizer: its tokenizer, or None.
        target: the model as the decoding loop uses it.
        matrix: the adjacency matrix.
        session: the drafter, the draft-size policy, the context and the graphs.
        warned: reasons why calls of ``generate`` fell back to standard decoding.
        disabled: whether it can no longer be a ``custom_generate`` (see ``Enabled.disable``).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: a Transformers ``…ForCausalLM``, or an object that wraps one: a pipeline, a peft
                model, … Its ``generate`` is patched to pass streamers and tokenizers to
                ``custom_generate``; its modules are left as they are.
            tokenizer: its tokenizer. None: prompts must be token ids, and answers have no text.
            **options: see ``options.Options``.

        Raises:
            TokenRecyclingError: there is no such option, or an option, the drafter, the tree or the
                matrix cannot be used.
        """
        self.options = given = Options.of(options)
        compile_kernels()
        self.model, self.tokenizer = model_inside(model), tokenizer
        matrix = given.load_matrix()
        self.target = open_target(
            self.model, strict=given.strict, float32_logits=given.float32_logits
        )
        k = given.candidates(self.target.vocab_size) if matrix is None else matrix.k
        template = given.template(k)
        name = fingerprint(tokenizer, self.target.vocab_size)
        with ordinary_tensors():  # the caller may leave inference mode later
            if matrix is None:
                matrix = AdjacencyMatrix(self.target.vocab_size, k, fingerprint=name)
            matrix.check(self.target.vocab_size, name, what="this model")
            self.matrix = matrix
            drafter, size = drafter_and_size(given, self.target, matrix, template)
        device = self.target.device
        self.session = Session(self.target, drafter, size, given, template)
        if device.type == "cuda":
            self.session.graph_decoder()  # kernels begin to be compiled
        self.warned: set[str] = set()
        self.disabled = False
        self.lock = FairLock()
        patch_generate(self.model, self)

    def __repr__(self) -> str:
        """Name the model, how drafts are made, and what they have brought so far."""
        drafts = f"drafter={self.drafter.name!r}, {self.session.described_size}"
        bits = ", batch-invariant" * self.batch_invariant
        brought = f", MAT {self.stats.mat:.2f} in {self.stats.steps} steps" * bool(self.stats.steps)
        return f"<TokenRecycling of {type(self.model).__name__}: {drafts}{bits}{brought}>"

    @property
    def batch_invariant(self) -> bool:
        """Whether texts are those of ``drafter="none"``, token for token, in any dtype.

        The logits of a drafted token then have the bits of a step of its own, whatever else the
        forward contains: other nodes, other rows of a batch. It is found out when the model is
        loaded and when an answer begins after it has changed, and is False between such a change
        and that answer. On a CPU it is False for steps as graphs and for drafts of more than 128
        tokens, such as one that a drafter of another package has made. On a GPU the sizes of
        captured steps are tried, alone and in batches of up to 16 prompts and 256 tokens (see
        ``probe.SHAPES``); it is False for steps of other sizes.
        """
        target = self.target
        changed = isinstance(target, TreeTarget) and (
            target.fingerprint is None or target.fingerprint.change() is not None
        )
        return not changed and self._is_invariant()

    def _is_invariant(self) -> bool:
        """Return ``batch_invariant`` of a model that has not changed."""
        largest = self.session.largest_draft
        if self.target.device.type == "cuda":  # captured steps run the kernels of eager ones
            fits = self.session.graphs and (self.options.nodes is None or largest in GRAPH_SIZES)
        else:
            fits = largest <= FEW_TOKENS and not self.session.graphs
        return self.target.batch_invariant and fits

    def __copy__(self) -> TokenRecycling:
        """Share the model and nothing else."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.target = copy.copy(self.target)
        twin.target.reset()
        # In one call, since the drafter uses the matrix.
        twin.matrix, drafter, size, stats = copy.deepcopy(
            (self.matrix, self.drafter, self.draft_size, self.stats)
        )
        twin.session = replace(
            self.session, target=twin.target, drafter=drafter, draft_size=size, stats=stats
        )
        twin.warned, twin.lock = set(self.warned), FairLock()
        patch_generate(twin.model, twin)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        patch_generate(self.model, self)

    def check_model(self) -> str | None:
        """Adopt what has changed in the model since the last answer (see ``probe.probe_changes``).

        Returns:
            Why the model cannot verify trees as it is now, or None.
        """
        return probe_changes(self.target) if isinstance(self.target, TreeTarget) else None

    @property
    def drafter(self) -> AnyDrafter:
        """What proposes the drafts."""
        return self.session.drafter

    @property
    def draft_size(self) -> DraftSize:
        """The draft-size policy."""
        return self.session.draft_size

    @property
    def stats(self) -> Stats:
        """The sum over all answers."""
        return self.session.stats

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        dequantize: bool = False,
        **options: Any,
    ) -> TokenRecycling:
        """Load a model and its tokenizer.

        Args:
            name_or_path: a checkpoint; None: the small bundled model.
            device: where to put the model; None: an accelerator if there is one, else the CPU.
                Omit it with ``device_map``.
            dtype: None: float32 on a CPU and for the bundled model, else the checkpoint's own.
            dequantize: convert the weights of a GGUF file to ``dtype``; on a CPU they stay packed
                otherwise, if ``dtype`` is float32.
            **options: those of ``options.Options``. All others are passed to
                ``AutoModelForCausalLM.from_pretrained`` unchanged: ``device_map``,
                ``quantization_config``, ``attn_implementation``, …

        Raises:
            TokenRecyclingError: the checkpoint cannot be loaded, or as in ``__init__``.
        """
        recycling_options = {name: options.pop(name) for name in Options.names() if name in options}
        given = Options.of(recycling_options)
        plan = planned(name_or_path, device, dtype, **options)
        if plan is not None and given.graphs_on(plan.device):
            drafts = given.drafter == AdaptiveDrafter.name
            compile_ahead(*plan, given.k or defaults.CANDIDATES if drafts else None)
        try:
            model, tokenizer = load_checkpoint(
                name_or_path, device, dtype, dequantize=dequantize, **options
            )
        except TokenRecyclingError as error:
            for name in options:  # Transformers passes what it does not know to the model
                if f"unexpected keyword argument '{name}'" in str(error):
                    raise unknown_option(name, Options.names()) from error
            raise
        recycler = cls(model, tokenizer, **recycling_options)
        recycler.warm()
        return recycler

    def warm(
        self,
        rows: Iterable[int] = (1,),
        sizes: Iterable[int] = (),
        *,
        seconds: float = defaults.WARM_SECONDS,
    ) -> None:
        """Prepare what answers on a GPU will need, so that the first ones are fast.

        Waits for kernels, which Triton compiles once on a machine, and captures the steps with
        which answers begin. ``from_pretrained`` does so for one row. On other devices, and without
        graphs, there is nothing to prepare. The context is dropped.

        Args:
            rows: numbers of prompts that will be decoded as one batch.
            sizes: tokens that steps verify per prompt; none: the size with which answers begin.
            seconds: that kernels are waited for at most; answers are decoded by captured plain
                steps until they are there.

        Raises:
            TokenRecyclingError: another answer is in progress and the option ``queue`` is False.
        """
        begun = perf_counter()
        with self._locked(), ordinary_tensors():
            if self.check_model() is None and self.session.warm(rows, sizes, seconds):
                logger.info("kernels and steps prepared in %.1f s", perf_counter() - begun)

    def reset(self) -> None:
        """Empty the matrix, and forget the context (cold start)."""
        with self.lock.acquired(wait=True):
            self.matrix.reset()
            self.session.forget()

    def teach(
        self,
        tokens: int = defaults.TAUGHT_TOKENS,
        *,
        seconds: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> int:
        """Let the model answer generic prompts, and learn from its answers.

        The matrix then is what a user's first answers start from; ``matrix.save`` keeps it.

        Args:
            tokens: of all answers.
            seconds: for at most so long; None: no limit.
            on_progress: called with (tokens done, ``tokens``).

        Returns:
            The tokens of all answers.

        Raises:
            TokenRecyclingError: there is no tokenizer; the drafter is not "adaptive"; or another
                answer is in progress and the option ``queue`` is False.
        """
        with self._locked(), ordinary_tensors():
            if reason := self.check_model():
                raise TokenRecyclingError(f"the model cannot verify trees: {reason}")
            return teach(
                self.drafter,
                self.target,
                self.tokenizer,
                tokens=tokens,
                seconds=seconds,
                on_progress=on_progress,
            )

    def forget_context(self) -> None:
        """Free the KV cache; an unfinished answer cannot continue."""
        with self.lock.acquired(wait=True):
            self.session.forget()

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateArguments]) -> Generation: ...

    @overload
    def generate(self, prompt: Batch, **options: Unpack[GenerateArguments]) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Batch, **options: Unpack[GenerateArguments]
    ) -> Generation | list[Generation]:
        """Generate the answer to a prompt, or to a list of prompts as one batch.

        Args:
            prompt: a string, a conversation (list of messages), token ids, or a list of these.
            **options: see ``stream``.

        Returns:
            A ``Generation``, or a list of them for a list of prompts.

        Raises:
            TokenRecyclingError: a prompt or an option cannot be used.
        """
        batch = is_batch(prompt)
        prompts: Any = list(prompt) if batch else [prompt]
        call = self._prepare(prompts, options, stream=False)
        with RestoredModes(), self._locked(), closing(self._decode(call)) as steps:
            for step in steps:
                call.on_step(step)
        invariant = self._is_invariant()
        answers = [Generation.of(row, self.tokenizer, invariant) for row in call.sequences]
        return answers if batch else answers[0]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateArguments]) -> Iterator[Chunk]:
        """Generate the answer to a prompt token by token.

        Another call of this object ends an open stream, which then raises ``TokenRecyclingError``.
        The caller may stop iterating at any time; matrix and context remain valid.

        Args:
            prompt: a string, which is continued as it is; a conversation (list of messages), for
                which the chat template is used, as on the command line; or token ids.
            **options: those of ``call.CallOptions``: ``max_new_tokens``, ``temperature``, ``seed``,
                ``stop``, ``keep_context``, ``on_progress``, ``on_step``, ``on_draft``; and
                ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and any other option of
                Transformers' ``generate`` that creates a logits processor, with the meaning and
                default it has there.

        Yields:
            One ``Chunk`` per token.

        Raises:
            TokenRecyclingError: the prompt or an option cannot be used.
        """
        return self._chunks(self._prepare([prompt], options, stream=True))

    def _chunks(self, call: Call) -> Iterator[Chunk]:
        (sequence,) = call.sequences
        assert sequence.text is not None
        with closing(self._decode(call)) as steps:  # close as soon as the consumer stops
            for number in count():
                begin = sequence.new_length
                with RestoredModes(), self._locked():
                    if number:
                        check_unchanged(self.target, whole=number % WHOLE_CHECK == 0)
                    step = next(steps, None)
                    if not sequence.active:
                        check_unchanged(self.target, whole=True)
                if step is None:
                    return
                call.on_step(step)
                reason = sequence.finish_reason
                if reason is not None:
                    sequence.text.finish()
                tokens = sequence.new_tokens
                for index in range(begin, len(tokens)):
                    last = index == len(tokens) - 1
                    yield Chunk(
                        sequence.text.pieces[index],
                        tokens[index],
                        from_draft=begin > 0 and not last,
                        finish_reason=reason if last else None,
                        stats=sequence.stats if last and reason is not None else None,
                    )

    def _prepare(self, prompts: list[Prompt], given: Mapping[str, Any], *, stream: bool) -> Call:
        names = {field.name for field in fields(CallOptions)}
        options = CallOptions(**{name: given[name] for name in names & given.keys()})
        processors = {name: value for name, value in given.items() if name not in names}
        return prepare_call(
            self.model, self.tokenizer, self.target, prompts, options, processors, stream=stream
        )

    def _decode(self, call: Call) -> Steps:
        """Decode a call, plainly if the model cannot verify trees."""
        reason = self.check_model()
        if reason is not None:
            warn_plain(self, reason)
        yield from self.session.decode(
            call.sequences,
            call.accept,
            call.options,
            plain=reason is not None,
            keep=len(call.sequences) == 1,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Acquire the lock for a ``with`` block.

        Raises:
            TokenRecyclingError: an answer is in progress in this thread, or in another thread while
                ``queue`` is False.
        """
        with self.lock.acquired(wait=self.options.queue) as acquired:
            if not acquired:
                raise TokenRecyclingError("the model is already generating another answer")
            yield

    def serve_generate(
        self, model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None
    ) -> Any:
        """Serve ``model.generate(…, custom_generate=recycler)``.

        Returns:
            What ``generate`` returns without ``custom_generate``.

        Raises:
            TokenRecyclingError: ``model`` is not the recycler's, or the call cannot be served and
                ``strict`` is set.
        """
        if model is not self.model:
            raise TokenRecyclingError("this recycler was made for another model object")
        if self.disabled:  # streamers would wait for ever
            raise TokenRecyclingError("this recycler was disabled; make another TokenRecycling")
        return serve(self, request, streamer, inputs_tensor)
