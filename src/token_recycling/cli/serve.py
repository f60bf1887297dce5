"""`token-recycling serve`: a local server with OpenAI's interface."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import tempfile
import warnings
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skinny_kernels.errors import one_line
from token_recycling.cli import options as o
from token_recycling.cli import show
from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError, printable

if TYPE_CHECKING:
    from token_recycling.recycler import TokenRecycling

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
ROWS, WAITING = 16, 64
MINUTES, DRAIN_SECONDS = 5.0, 30
CONTEXTS = 4  # default room for contexts, in contexts of the longest kind; at most MOST_MIB
MOST_MIB = 1024
MIB = 2**20
KEYS = "TOKEN_RECYCLING_API_KEY"
# As browsers send it: in lower case, without a path.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
EVERYWHERE = ("0.0.0.0", "::")


@o.expanded(loading=o.loading_without("model", "cold"))
def serve(
    loading: o.Loading,
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder, GGUF file or Hub name; default: bundled."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar=KEYS,
            help="Requests must have this key; may be repeated.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="The model's name in requests; default: its folder's name."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Requests decoded at once.")] = ROWS,
    queue: Annotated[
        int, typer.Option("--queue", help="Requests that may wait; more get status 429.")
    ] = WAITING,
    prefix_cache: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache",
            help="MiB for keys and values of the last conversations; 0: none; default: room for "
            f"{CONTEXTS} of the longest, at most {MOST_MIB}.",
        ),
    ] = None,
    matrix_scope: Annotated[
        str,
        typer.Option(
            "--matrix-scope",
            help="Who shares what the matrix learns: shared (all), key, request.",
        ),
    ] = "shared",
    save_minutes: Annotated[
        float, typer.Option("--save-minutes", help="Minutes between two saves of --matrix.")
    ] = MINUTES,
    drain_seconds: Annotated[
        int,
        typer.Option("--drain-seconds", help="Seconds for answers in progress at SIGTERM, Ctrl-C."),
    ] = DRAIN_SECONDS,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Web pages that may use the API, such as https://example.org; *: all; may be "
            "repeated.",
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Proxy, or network of them, whose X-Forwarded-For is believed; may be repeated.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print a line per answer.")] = False,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Print a line for every HTTP request, too.")
    ] = False,
) -> None:
    """Serve a model to OpenAI's clients.

    There are chat and completions, and a chat page.

    SIGTERM and Ctrl-C finish the answers in progress, then save the matrix.
    """
    keys, origins = api_key or [], allowed_origin or []
    _check_numbers(port, batch, queue, prefix_cache, save_minutes, drain_seconds)
    _check_access(keys, origins)
    proxies = list(map(_network, trusted_proxy or []))
    if served_model_name == "":
        raise TokenRecyclingError("--served-model-name is empty")
    _check_scope(matrix_scope, loading.matrix, keys)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise TokenRecyclingError(
            f"serve needs {', '.join(missing)}: pip install 'token-recycling[serve]'"
        )
    matrix, loading = loading.matrix, replace(loading, model=model)
    known = matrix is not None and matrix.exists()
    with _bind(host, port) as sock:
        recycler, recycling = _open(loading)
        from token_recycling.server.app import Server, create_app
        from token_recycling.server.engine import Engine
        from token_recycling.server.metrics import Metrics
        from token_recycling.server.prefixes import PrefixCaches
        from token_recycling.server.run import http_server, run
        from token_recycling.server.scopes import MatrixScopes

        keeper = None
        if matrix is not None and matrix_scope == "shared":
            from token_recycling.integrations.engines.keep import MatrixKeeper

            keeper = MatrixKeeper(recycler.matrix, matrix, save_minutes)
        name = served_model_name or _name(model)
        engine = Engine(
            recycler,
            Metrics(name),
            MatrixScopes(recycler.drafter, matrix_scope),  # type: ignore[arg-type]
            PrefixCaches(_room(recycler) if prefix_cache is None else prefix_cache * MIB),
            most_rows=batch,
            most_waiting=queue,
            on_tick=None if keeper is None else keeper.tick,
        )
        about = {"recycling": recycling, "context": recycler.target.max_context}
        server = http_server(
            create_app(Server(engine, name, keys, about), origins),
            drain_seconds=drain_seconds,
            access_log=access_log,
            trusted_proxies=proxies,
        )
        if matrix is not None:
            saved = f"; will be saved every {save_minutes:g} minutes and on exit" if keeper else ""
            show.note(f"matrix     {matrix} {'loaded' if known else 'not there yet'}{saved}")
        if not quiet:
            show.log_lines("token_recycling.server")

        def print_start() -> None:
            _print_start(sock.getsockname(), name, recycler, recycling, bool(keys))

        try:
            run(server, engine, sock, drain_seconds=drain_seconds, on_start=print_start)
        finally:
            saved_last = keeper is None or keeper.finish()
        if not saved_last:
            raise typer.Exit(1)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, so that a port in use is found before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(0)  # else two servers could bind the same port before either listens
    except (socket.gaierror, UnicodeError) as error:  # the latter for names that are not valid
        raise TokenRecyclingError(f"--host is {host}; there is no such address") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TokenRecyclingError(
                f"port {port} is in use; stop the other program or choose another with --port"
            ) from error
        raise TokenRecyclingError(f"cannot use {host}:{port}: {error.strerror}") from error
    return listener


def _open(loading: o.Loading) -> tuple[TokenRecycling, str]:
    """Load the model; return it, and whether it recycles or why not."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", PlainDecodingWarning)
        recycler = loading.open()
    for warning in seen:
        show.note(f"warning: {one_line(warning.message)}")
    if recycler.tokenizer is None:
        raise TokenRecyclingError("this checkpoint has no tokenizer; a server needs one")
    for warning in seen:
        if issubclass(warning.category, PlainDecodingWarning):
            return recycler, f"off: {one_line(warning.message)}"
    if recycler.options.drafter == "none":
        return recycler, "off: the drafter is none"
    name = getattr(recycler.drafter, "name", "custom")
    size = recycler.session.described_size
    return recycler, f"on (drafter {name}, {size})"


def _name(model: str | None) -> str:
    """Return the default name of a model: that of its folder or on the Hub."""
    if model is None:
        return "token-recycling-demo"
    path = Path(model).resolve()
    return path.stem if path.is_file() else path.name if path.is_dir() else model


def _check_numbers(
    port: int,
    batch: int,
    queue: int,
    prefix_cache: int | None,
    save_minutes: float,
    drain_seconds: int,
) -> None:
    for option, value, low, high in (
        ("--port", port, 0, 65535),
        ("--batch", batch, 1, 256),
        ("--queue", queue, 0, 100_000),
        ("--prefix-cache", prefix_cache or 0, 0, 2**24),
        ("--save-minutes", save_minutes, 0.01, 1_000_000),
        ("--drain-seconds", drain_seconds, 0, 86_400),
    ):
        if not low <= value <= high:
            raise TokenRecyclingError(f"{option} is {value}; choose {low} to {high}")


def _check_access(keys: list[str], origins: list[str]) -> None:
    if not all(key and key.isascii() and key.isprintable() and key.strip() == key for key in keys):
        raise TokenRecyclingError("--api-key is empty or not printable ASCII")
    if not keys and KEYS in os.environ:
        raise TokenRecyclingError(f"{KEYS} is empty; set a key, or unset it to require none")
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise TokenRecyclingError(
                f"--allowed-origin is {origin}; give * or what browsers send: https://example.org"
            )


def _network(proxy: str) -> str:
    """Return a proxy's address, or a network, as the server compares them."""
    try:
        return str(ip_network(proxy, strict=False))
    except ValueError as error:
        raise TokenRecyclingError(
            f"--trusted-proxy is {printable(proxy)}; give an IP address, or a network such as "
            "10.0.0.0/8"
        ) from error


def _check_scope(scope: str, matrix: Path | None, keys: list[str]) -> None:
    from token_recycling.server.scopes import SCOPES

    if scope not in SCOPES:
        raise TokenRecyclingError(f"--matrix-scope is {scope}; choose one of {', '.join(SCOPES)}")
    if scope == "key" and not keys:
        raise TokenRecyclingError("--matrix-scope key needs --api-key, once per caller")
    if matrix is not None and matrix.is_dir():
        raise TokenRecyclingError(f"--matrix is the folder {matrix}; give a file")
    if matrix is not None and scope != "shared" and not matrix.exists():
        raise TokenRecyclingError(
            f"no matrix file at {matrix}; with --matrix-scope {scope} it is only read"
        )
    if matrix is not None and scope == "shared" and matrix.parent.is_dir():
        try:
            with tempfile.NamedTemporaryFile(dir=matrix.parent):
                pass
        except OSError as error:
            raise TokenRecyclingError(
                f"cannot write to the folder of the matrix file: {error.strerror}"
            ) from error


def _room(recycler: TokenRecycling) -> int:
    """Return the default number of bytes for contexts."""
    from token_recycling.model.limits import head_shapes, text_config

    config = recycler.model.config
    _, heads, size = head_shapes(config)
    layers = text_config(config).num_hidden_layers
    per_token = 2 * layers * heads * size * recycler.model.dtype.itemsize
    return int(min(MOST_MIB * MIB, CONTEXTS * (recycler.target.max_context or 4096) * per_token))


def _print_start(
    address: tuple[Any, ...], name: str, recycler: TokenRecycling, recycling: str, key: bool
) -> None:
    """Print where the server is and how to try it."""
    host, port = address[:2]
    display_host = "localhost" if host in EVERYWHERE else (f"[{host}]" if ":" in host else host)
    url = f"http://{display_host}:{port}"
    context = recycler.target.max_context
    size = sum(weight.numel() for weight in recycler.model.parameters())
    dtype = str(recycler.model.dtype).removeprefix("torch.")
    about = f"{name} ({size / 1e6:.3g}M parameters, {dtype}, {recycler.target.device}"
    asked = [{"role": "user", "content": "Tell me a story"}]
    body = json.dumps({"messages": asked, "max_tokens": 200})
    page = f"chat page  {url}/\n"
    header = " -H 'Authorization: Bearer YOUR_KEY'" if key else ""
    route = "chat/completions"
    if not getattr(recycler.tokenizer, "chat_template", None):
        body, route = json.dumps({"prompt": "Once upon a time", "max_tokens": 100}), "completions"
        page = ""  # it needs a chat template
    if host in EVERYWHERE and not key:
        show.note("warning: everyone who can reach this machine can use the server: no --api-key")
    show.note(
        f"model      {about}, context {context})\n"
        f"recycling  {recycling}\n"
        f"API        {url}/v1\n"
        f"{page}"
        f"try        curl {url}/v1/{route}{header} "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
