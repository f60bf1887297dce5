"""Options of the adapters for serving engines, and the drafter that they configure."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from skinny_kernels.errors import one_line
from token_recycling import defaults
from token_recycling.decoding.warm_up import compile_kernels
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.checked import checked
from token_recycling.drafting.matrix import AdjacencyMatrix, fingerprint
from token_recycling.drafting.registry import SHAPE_THEIR_OWN, make_drafter
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.keep import MatrixKeeper
from token_recycling.util.files import is_file

if TYPE_CHECKING:
    from token_recycling.drafting.device import DeviceMatrix

CONTEXT = 2048  # tokens of each request searched for earlier occurrences of its last tokens
MAX_STEP_TOKENS = 256  # maximum tokens verified per step, over all requests
# Steps of more tokens verify a multiple of it: kernels are prepared for every number of tokens, and
# graphs are captured for some.
DRAFT_MULTIPLE = 8
NUMBERS = {"candidates", "context", "max_step_tokens", "save_minutes"}
MOST = 2**24  # of a number
YES, NO = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}
Self = TypeVar("Self", bound="ServingOptions")


@dataclass(frozen=True)
class ServingOptions:
    """Options for users of a serving engine.

    Attributes:
        drafter: name of the drafter.
        tree: name or file of the tree that the drafter fills, if it is of that kind; None: as many
            of the paths that text takes most often as the engine has room for.
        candidates: k of the matrix.
        matrix: file of a matrix to start with.
        save_matrix: file in which what the server learns is saved, when it ends and every
            ``save_minutes``. If it exists and ``matrix`` is None, the server starts with it.
        save_minutes: see ``save_matrix``.
        automatic: draft only what pays, by the times of the engine's steps (see
            ``AutoSize``); False: whole drafts.
        context: tokens of each request that are searched.
        max_step_tokens: maximum tokens verified per step, over all requests; larger batches get
            smaller drafts, down to the root alone.
    """

    drafter: str = defaults.DRAFTER
    tree: str | None = None
    candidates: int = defaults.CANDIDATES
    matrix: str | None = None
    save_matrix: str | None = None
    save_minutes: int = 10
    automatic: bool = True
    context: int = CONTEXT
    max_step_tokens: int = MAX_STEP_TOKENS

    @classmethod
    def parse(cls: type[Self], given: dict[str, Any]) -> Self:
        """Parse options; numbers may be strings.

        Raises:
            TokenRecyclingError: there is no such option, or its value is invalid.
        """
        known = {field.name: field for field in fields(cls)}
        for name in given:
            if name not in known:
                raise TokenRecyclingError(
                    f"Token Recycling has no option {name!r}; use one of {', '.join(known)}"
                )
        drafter = given.get("drafter", cls.drafter)
        values = {"candidates": defaults.candidates_for(drafter), **given}
        automatic = str(values.get("automatic", cls.automatic)).lower()
        if automatic not in YES | NO:
            raise TokenRecyclingError(f"automatic is {automatic!r}; it must be true or false")
        values["automatic"] = automatic in YES
        for name in NUMBERS & values.keys():
            values[name] = _whole(name, values[name])
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if "str" in str(field.type) and not isinstance(value, str) and value != field.default:
                raise TokenRecyclingError(f"{field.name} is {value!r}; it must be a string")
        for name, least in (("context", 256), ("max_step_tokens", 1), ("save_minutes", 1)):
            value = getattr(self, name)
            if not least <= value <= MOST:
                bound = f"{least} or more" if value < least else f"at most {MOST}"
                raise TokenRecyclingError(f"{name} is {value}; it must be {bound}")

    @classmethod
    def from_environment(cls) -> ServingOptions:
        """Parse options from environment variables, ``TOKEN_RECYCLING_`` and the upper-case name.

        Raises:
            TokenRecyclingError: a value is invalid.
        """
        variables = {
            field.name: os.environ.get(f"TOKEN_RECYCLING_{field.name.upper()}")
            for field in fields(cls)
        }
        return cls.parse({name: value for name, value in variables.items() if value})

    def make(
        self,
        vocab_size: int,
        nodes: int,
        tokenizer: Callable[[], Any] = lambda: None,
    ) -> AnyDrafter:
        """Create the drafter.

        Args:
            vocab_size: of the engine's model.
            nodes: maximum nodes of a draft, without the root.
            tokenizer: loads the engine's tokenizer, to check it against a matrix from a file;
                returns None if the engine has none.

        Raises:
            TokenRecyclingError: a file or name does not exist, the tree has too many nodes, or the
                matrix belongs to another model.
        """
        file = self.matrix
        if file is None and self.save_matrix is not None and is_file(self.save_matrix):
            file = self.save_matrix
        if file is not None:
            matrix = AdjacencyMatrix.load(file)
            name = fingerprint(tokenizer(), vocab_size) if matrix.fingerprint else ""
            matrix.check(vocab_size, name, what=f"the engine's model (file {file})")
        else:
            name = "" if self.save_matrix is None else fingerprint(tokenizer(), vocab_size)
            k = min(self.candidates, vocab_size)
            matrix = AdjacencyMatrix(vocab_size, k, fingerprint=name)
        compile_kernels()
        template = self._template(matrix.k, nodes)
        largest = min(nodes, defaults.LARGEST_DRAFT)
        return checked(make_drafter(self.drafter, matrix, template, largest), vocab_size)

    def _template(self, k: int, nodes: int) -> TreeTemplate | None:
        """Return the tree that the drafter fills; None if it shapes its own."""
        if self.drafter in SHAPE_THEIR_OWN:
            if self.tree is not None:
                raise TokenRecyclingError(
                    f"the drafter {self.drafter} shapes its own trees; remove the option tree"
                )
            return None
        template = TreeTemplate.load(self.tree or "ranked", k)
        if self.tree is None:
            return template.first(min(nodes, len(template.paths)))
        if len(template.paths) > nodes:
            raise TokenRecyclingError(
                f"the tree {template.name} has {len(template.paths)} nodes below the root, but "
                f"the engine has room for {nodes}"
            )
        return template

    def keeper(
        self, drafter: AnyDrafter, matrix: DeviceMatrix | None = None
    ) -> MatrixKeeper | None:
        """Return what saves the drafter's matrix; None if nothing is to be saved.

        Args:
            drafter: whose matrix was made or read.
            matrix: what the server learns into; None: the drafter's own.

        Raises:
            TokenRecyclingError: the file cannot be written, or the drafter has no matrix.
        """
        if self.save_matrix is None:
            return None
        if drafter.matrix is None:
            raise TokenRecyclingError(f"the drafter {drafter.name} has no matrix to save")
        drafter.matrix.save(self.save_matrix)  # fails here, not after hours
        learnt = drafter.matrix if matrix is None else matrix
        return MatrixKeeper(learnt, self.save_matrix, self.save_minutes)

    def size(self, drafter: AnyDrafter, device_type: str) -> AutoSize | None:
        """Return the draft-size policy; None: drafts are verified whole."""
        if not (self.automatic and drafter.acceptance):
            return None
        return AutoSize(drafter.acceptance, CostCurve.assumed(device_type), multiple=DRAFT_MULTIPLE)

    def size_for(self, requests: int, most: int) -> int:
        """Return the nodes of each draft, root included, in a step of ``requests`` requests."""
        return max(1, min(most, self.max_step_tokens // max(requests, 1)))


def load_tokenizer(name: str | None, **options: Any) -> Any:
    """Load an engine's tokenizer by name or path; return None if it has none.

    Raises:
        TokenRecyclingError: it cannot be loaded.
    """
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # a broken checkpoint can raise anything
        line = one_line(error, 200)
        raise TokenRecyclingError(f"cannot load the tokenizer {name}: {line}") from error


def _whole(name: str, value: Any) -> int:
    """Return a number, or the number in a string.

    Raises:
        TokenRecyclingError: it is none.
    """
    with suppress(TypeError, ValueError, OverflowError):
        if isinstance(value, str) or (int(value) == value and not isinstance(value, bool)):
            return int(value)
    raise TokenRecyclingError(f"{name} is {value!r}; it must be a whole number")
