"""Options shared by several subcommands, and loading a model with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from skinny_kernels.cores import usable_cores
from token_recycling import defaults
from token_recycling.cli import completion, show
from token_recycling.cli.interrupts import raise_again
from token_recycling.cli.progress import busy_shown
from token_recycling.errors import TokenRecyclingError, printable

if TYPE_CHECKING:
    from token_recycling.recycler import TokenRecycling

# Options that several subcommands declare themselves; the others are fields of the classes below.
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option("--temp", help="0 is greedy; above 0 samples.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.")]
Model = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", help="Checkpoint folder, GGUF file or Hub name; default: bundled."
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        "--top-k-candidates",
        help=f"Candidates per token; default: {defaults.CANDIDATES}, "
        f"for the paper's drafter {defaults.PAPER_CANDIDATES}.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt without a chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


TOY = (
    "the bundled model is a toy of 3.4 M parameters; for sensible answers choose a model with -m, "
    'for example -m "$(token-recycling fetch-model)"'
)


@dataclass(frozen=True)
class Loading:
    """Options that select the model and how to draft; every subcommand has some of them."""

    model: Model = None
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps …")] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help=f"{', '.join(completion.DTYPES)}.",
            autocompletion=completion.dtype,
        ),
    ] = None
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Convert the weights of a GGUF file to --dtype.")
    ] = False
    float32_logits: Annotated[
        bool, typer.Option("--float32-logits", help="LM head in float32, for half precision.")
    ] = False
    graph: Annotated[
        bool | None,
        typer.Option("--graph/--no-graph", help="Capture steps as CUDA graphs; default: on CUDA."),
    ] = None
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            help="adaptive, paper, prompt-lookup or none.",
            autocompletion=completion.drafter,
        ),
    ] = defaults.DRAFTER
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="Nodes of every draft; default: chosen automatically."),
    ] = None
    tree: Annotated[
        str | None,
        typer.Option(
            "--tree",
            help="For --drafter paper: a shipped tree, chain-N or a file; see `tree`.",
            autocompletion=completion.tree,
        ),
    ] = None
    k: Candidates = None
    matrix: Annotated[
        Path | None,
        typer.Option("--matrix", help="Matrix file: loaded if it exists, saved at the end."),
    ] = None
    cold: Annotated[bool, typer.Option("--cold", help="Empty the matrix before every answer.")] = (
        False
    )
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if tree attention cannot be used.")
    ] = False

    def open(self) -> TokenRecycling:
        """Load the model; on a terminal, stderr shows a spinner.

        Raises:
            TokenRecyclingError: an option or the checkpoint cannot be used.
        """
        if self.cold and self.matrix is not None:
            raise TokenRecyclingError("--cold and --matrix cannot be combined; choose one")
        cores = usable_cores()
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise TokenRecyclingError(
                f"--threads is {self.threads}; choose 1 to {cores}, the cores that it may use"
            )
        if self.matrix is not None:
            folder = self.matrix.parent
            if self.matrix.is_dir():
                raise TokenRecyclingError(f"--matrix is the folder {self.matrix}; give a file")
            if not folder.is_dir():
                raise TokenRecyclingError(f"the folder of the matrix file does not exist: {folder}")
            if not os.access(folder, os.W_OK):
                raise TokenRecyclingError(
                    f"the folder of the matrix file cannot be written to: {folder}"
                )
        with busy_shown(f"loading {self.model or 'the bundled model'}") as relabel:
            from token_recycling.checkpoint.load import check_device, check_dtype, is_remote
            from token_recycling.options import Options

            # Reported before a model is loaded.
            check_device(self.device)
            check_dtype(self.dtype)
            options = {name: getattr(self, name) for name in Options.names() if hasattr(self, name)}
            options["matrix"] = self.matrix if self.matrix and self.matrix.exists() else None
            k = defaults.candidates_for(self.drafter) if self.k is None else self.k
            Options.of(options).template(k)
            if is_remote(self.model):  # fetching may fail offline
                name = printable(self.model)
                show.note(f"there is no folder {name} here; looking for it on the Hugging Face Hub")
            import torch
            from transformers.utils import logging

            from skinny_kernels.compiled import noticed
            from token_recycling.recycler import TokenRecycling

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            # Else it prints a line for every attempt.
            getLogger("huggingface_hub").setLevel("ERROR")
            # PyTorch does not know the limit of a container.
            torch.set_num_threads(self.threads or min(torch.get_num_threads(), cores))
            with noticed(lambda: relabel("compiling kernels for this processor")):
                recycler = TokenRecycling.from_pretrained(
                    self.model,
                    device=self.device,
                    dtype=self.dtype,
                    dequantize=self.dequantize,
                    **options,
                )
            if self.graph and recycler.target.device.type != "cuda":
                show.note(f"--graph: on {recycler.target.device.type} nothing is captured")
        raise_again()
        return recycler

    def note_toy(self) -> None:
        """Say on stderr that the bundled model is a toy, if it is the one that was loaded."""
        if self.model is None:
            show.note(TOY)

    def save(self, recycler: TokenRecycling) -> None:
        """Save the matrix to the file given by ``--matrix``, if any."""
        if self.matrix is not None:
            recycler.matrix.save(self.matrix)


@dataclass(frozen=True)
class Sampling:
    """Options of an answer."""

    temp: Temperature = 0.0
    top_p: TopP = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Sample from the best K; 0: all. As in generate()."),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help="Drop tokens less likely than this fraction of the likeliest."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="1 disables it.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed for sampling.")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop before this text; may be repeated."),
    ] = None

    def options(self, max_tokens: int) -> dict[str, Any]:
        """Return the given options as arguments of ``TokenRecycling.generate``.

        Raises:
            TokenRecyclingError: a number is out of range.
        """
        from token_recycling.decoding.numbers import SAMPLING_ONLY, checked

        if max_tokens < 1:
            raise TokenRecyclingError(f"-n is {max_tokens}; it must be 1 or more")
        given = {name: value for name, value in vars(self).items() if value is not None}
        given["temperature"] = given.pop("temp")
        if not given["temperature"]:
            unused = [name for name in given if name in SAMPLING_ONLY]
            if unused:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
                show.note(f"{options}: not used without --temp, as nothing is sampled")
        return {"max_new_tokens": max_tokens, "seed": None, **checked(given)}


def loading_without(*names: str) -> tuple[str, ...]:
    """Return the names of all fields of ``Loading`` but these."""
    return tuple(field.name for field in fields(Loading) if field.name not in names)


def expanded(**chosen: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a subcommand options that are declared once.

    ``@expanded(loading=("model", "device"))`` replaces the parameter ``loading`` of the subcommand,
    which is a dataclass, by its fields ``model`` and ``device``; the subcommand gets the dataclass.

    Args:
        **chosen: for each such parameter, the fields that become options; none: all.
    """

    def decorate(subcommand: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(subcommand, include_extras=True)
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=own.default, annotation=hints[name])
            for name, own in signature(subcommand).parameters.items()
            if name not in chosen
        ]
        names: dict[str, tuple[str, ...]] = {}
        for group, some in chosen.items():
            types = get_type_hints(hints[group], include_extras=True)
            names[group] = some or tuple(types)
            parameters += [
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=getattr(hints[group], name),
                    annotation=types[name],
                )
                for name in names[group]
            ]

        @wraps(subcommand)
        def run(**given: Any) -> None:
            for group, some in names.items():
                given[group] = hints[group](**{name: given.pop(name) for name in some})
            subcommand(**given)

        del run.__wrapped__  # its signature is another one
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
