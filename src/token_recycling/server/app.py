"""The HTTP interface: OpenAI's endpoints, health, metrics and the chat page."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from token_recycling.server.body_limit import BodyLimit
from token_recycling.server.choices import (
    ChatChoice,
    Envelope,
    Json,
    TextChoice,
    TokenTexts,
    Usage,
    drafts,
)
from token_recycling.server.engine import DrainingError, Engine, QueueFullError
from token_recycling.server.errors import ApiError
from token_recycling.server.job import Ended, Event, Failed, Job, NewTokens
from token_recycling.server.prompts import Answer, Prompts
from token_recycling.server.schemas import ChatRequest, CompletionRequest, SamplingFields

# Pydantic's problems with a body that is no object, its word for an object, and how it names the
# types of a union in the place of a problem.
NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")
JARGON = "a valid dictionary or object to extract fields from"
UNION = re.compile(r"str|NamedTool|(list|literal)\[.*\]")
READ = ["GET", "HEAD"]
API = "/v1/"  # requests for it need a key
PAGE = Path(__file__).parent / "static" / "chat.html"
T = TypeVar("T")


class Choice(Protocol):
    """A choice that is being written (see ``ChatChoice``)."""

    def first_chunk(self) -> Json | None: ...  # noqa: D102
    def chunk(self, event: NewTokens) -> Json | None: ...  # noqa: D102
    def last_chunk(self, event: Ended) -> Json: ...  # noqa: D102
    def whole(self) -> Json: ...  # noqa: D102


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        key: the API key; "" if none are required.
        name: with whom the request waits in turn.
    """

    key: str
    name: str


class Answering:
    """The jobs of one request and their events."""

    def __init__(
        self, engine: Engine, answers: list[Answer], caller: Caller, top_logprobs: int | None
    ) -> None:
        """Queue a job for every answer.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
        """
        self._engine = engine
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs = [
            Job(
                answer.prompt,
                answer.options,
                answer.processors,
                key=caller.key,
                caller=caller.name,
                emit=self._emitter(index),
                grammar=answer.grammar,
                special_tokens=answer.parser is not None and answer.parser.special_tokens,
                top_logprobs=top_logprobs,
            )
            for index, answer in enumerate(answers)
        ]
        self.left = len(self._jobs)  # jobs that have not ended
        if self.left > engine.most_jobs:
            raise ApiError(
                f"{self.left} choices are more than this server takes at once ({engine.most_jobs})"
            )
        try:
            engine.submit(self._jobs)
        except QueueFullError as error:
            raise ApiError(
                str(error),
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=error.seconds,
            ) from error
        except DrainingError as error:
            raise ApiError(
                "the server is shutting down", status=503, kind="server_error", retry_after=1
            ) from error

    def _emitter(self, index: int) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return emit

    async def next(self) -> tuple[int, NewTokens | Ended]:
        """Return the next event and its answer.

        Raises:
            ApiError: the answer cannot be given.
        """
        index, event = await self._events.get()
        if isinstance(event, Failed):
            if event.refused:
                raise ApiError(event.message)
            raise ApiError(event.message, status=500, kind="server_error")
        self.left -= isinstance(event, Ended)
        return index, event

    def close(self) -> None:
        """End all jobs that have not ended."""
        for job in self._jobs:
            self._engine.abort(job)


async def _or_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Return the result of ``awaited``.

    Raises:
        ClientGoneError: the client has closed the connection before.
    """

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(closed())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientGoneError
        return result.result()
    finally:
        for task in (result, gone):
            task.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)


def _frame(data: Json | str) -> str:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n"


class Server:
    """The endpoints of one model."""

    def __init__(self, engine: Engine, name: str, keys: list[str], about: Json) -> None:
        """Serve.

        Args:
            engine: decodes the requests.
            name: of the model, as requests give it.
            keys: API keys of which each request must bring one; none: all are served.
            about: what the page shows of the model.
        """
        self.engine, self._name, self._keys, self._about = engine, name, keys, about
        self.prompts = Prompts(engine.recycler)
        self._texts = TokenTexts(self.prompts.tokenizer, self.prompts.eos)
        self._created = int(time.time())

    def caller(self, request: HTTPConnection) -> Caller:
        """Return who sends a request.

        Raises:
            ApiError: a key is required, and the request has none or a wrong one.
        """
        host = request.client.host if request.client else ""
        if not self._keys:
            return Caller("", host)
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        found = ""
        for key in self._keys:  # all of them, so that the time tells nothing
            if secrets.compare_digest(token.strip().encode(), key.encode()):
                found = key
        if scheme.lower() != "bearer" or not found:
            problem = "this server requires an API key: send Authorization: Bearer KEY"
            if scheme.lower() == "bearer" and token.strip():
                problem = "wrong API key"
            raise ApiError(problem, status=401, code="invalid_api_key")
        return Caller(found, found)

    def models(self) -> Json:
        """Return OpenAI's list of models."""
        return {"object": "list", "data": [self.model(self._name)]}

    def model(self, name: str) -> Json:
        """Return the entry of a model.

        Raises:
            ApiError: it is not the one that is served.
        """
        self._check_model(name)
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "token-recycling",
            "max_model_len": self.prompts.context,
        }

    def about(self) -> Json:
        """Return what the page shows."""
        return {"model": self._name, "needs_key": bool(self._keys), **self._about}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise ApiError(
                f"the model {json.dumps(name)} does not exist; this server has "
                f"{json.dumps(self._name)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a chat request."""
        self._check_model(body.model)
        answers = await run_in_threadpool(self.prompts.of_chat, body)
        choices: list[Choice] = [
            ChatChoice(index, self._texts, answer.parser) for index, answer in enumerate(answers)
        ]
        top = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer(request, body, answers, choices, top, "chat.completion")

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Answer a completion request."""
        self._check_model(body.model)
        answers = await run_in_threadpool(self.prompts.of_completion, body)
        choices: list[Choice] = [TextChoice(index, self._texts) for index in range(len(answers))]
        return await self._answer(request, body, answers, choices, body.logprobs, "text_completion")

    async def _answer(
        self,
        request: Request,
        body: SamplingFields,
        answers: list[Answer],
        choices: list[Choice],
        top_logprobs: int | None,
        kind: str,
    ) -> Response:
        # The choices of a prompt follow each other, and it is counted once.
        usage = Usage(sum(len(answer.prompt) for answer in answers[:: body.n or 1]))
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        answering = Answering(self.engine, answers, request.state.caller, top_logprobs)
        try:
            if not body.stream:
                await _or_gone(request, self._collect(answering, choices, usage))
                whole = Envelope(kind, prefix, self._name)
                return JSONResponse(
                    whole.json([choice.whole() for choice in choices], usage=usage.json())
                )
            # An answer that is refused gets a status of its own, so wait for the first event.
            first = await _or_gone(request, answering.next())
        except BaseException:
            answering.close()
            raise
        name = "chat.completion.chunk" if kind == "chat.completion" else kind
        stream = self._stream(
            answering, choices, usage, Envelope(name, prefix, self._name), body, first
        )
        return StreamingResponse(
            stream,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _collect(self, answering: Answering, choices: list[Choice], usage: Usage) -> None:
        """Wait for the end of all answers."""
        while answering.left:
            index, event = await answering.next()
            if isinstance(event, Ended):
                choices[index].last_chunk(event)
                usage.stats.append(event.stats)
            else:
                choices[index].chunk(event)
                usage.cached = max(usage.cached, event.cached)

    async def _stream(
        self,
        answering: Answering,
        choices: list[Choice],
        usage: Usage,
        envelope: Envelope,
        body: SamplingFields,
        first: tuple[int, NewTokens | Ended],
    ) -> AsyncIterator[str]:
        """Send the answers as server-sent events."""
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        with_drafts = bool(options and options.include_drafts)
        others: Json = {"usage": None} if with_usage else {}
        try:
            for choice in choices:
                if (chunk := choice.first_chunk()) is not None:
                    yield _frame(envelope.json([chunk], **others))
            event: NewTokens | Ended
            index, event = first
            while True:
                extra: Json = {}
                if isinstance(event, Ended):
                    chunk = choices[index].last_chunk(event)
                    usage.stats.append(event.stats)
                    if with_drafts:
                        stats = event.stats
                        speed = stats.tokens_per_second
                        extra["token_recycling"] = {"mat": stats.mat, "tokens_per_second": speed}
                else:
                    chunk = choices[index].chunk(event)
                    usage.cached = max(usage.cached, event.cached)
                    if with_drafts:
                        extra["token_recycling"] = {"drafts": drafts(event)}
                if chunk is not None or with_drafts:
                    shown = [] if chunk is None else [chunk]
                    yield _frame(envelope.json(shown, **others, **extra))
                if not answering.left:
                    break
                index, event = await answering.next()
            if with_usage:
                yield _frame(envelope.json([], usage=usage.json()))
            yield _frame("[DONE]")
        except ApiError as error:
            yield _frame(error.body)
        finally:
            answering.close()


class Authentication:
    """Middleware that finds out who sends a request, before its body is read."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        """Wrap ``app``; requests for the API must have a key of ``server``."""
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with its ``Caller`` in ``request.state.caller``."""
        if scope["type"] == "http" and scope["path"].startswith(API):
            try:
                caller = self._server.caller(HTTPConnection(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def create_app(server: Server, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application that serves ``server``, to web pages of ``allowed_origins`` too."""

    # No /docs: it would load scripts from another host, and describe errors that are not ours.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(Authentication, server=server)
    if allowed_origins:  # outermost: answers to wrong keys need its headers too
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; the code is that of nginx

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # raised where FastAPI reads the body
            return error.__cause__.response()
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path} here"
            if allowed := (error.headers or {}).get("Allow"):
                message += f"; use {', '.join(sorted(allowed.split(', ')))}"
        elif error.status_code == 400:
            return ApiError("the body is not valid JSON", code="invalid_json").response()
        return ApiError(message, status=error.status_code).response()

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return ApiError("internal error", status=500, kind="server_error").response()

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await server.chat(request, body)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await server.complete(request, body)

    @app.get("/v1/models")
    async def models() -> Json:
        return server.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        return server.model(name)

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        alive = server.engine.alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        text = server.engine.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/about", methods=READ)
    async def about() -> Json:
        return server.about()

    @app.api_route("/", methods=READ, response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    return app


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the first problem of a body in OpenAI's shape."""
    # Where several types are possible, the deepest problem is that of the one that was meant.
    problem: dict[str, Any] = dict(max(error.errors(), key=lambda one: len(one["loc"])))
    parts = [str(part) for part in problem["loc"] if part != "body"]
    where = [part for part in parts if not UNION.fullmatch(part)]
    param = ".".join(where) or None
    kind, message = problem["type"], str(problem["msg"])
    if kind == "json_invalid":
        return ApiError("the body is not valid JSON", code="invalid_json")
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        param = getattr(problem["ctx"]["error"], "field", param)
    elif not parts and kind in NO_OBJECT:  # no body, another type of content, or a list
        message = "send a JSON object, with Content-Type: application/json"
    elif kind == "extra_forbidden":
        message = f"unrecognized request argument: {param}"
    elif kind == "missing":
        message = f"{param} is missing"
    elif param:
        message = f"{param}: {message[:1].lower()}{message[1:]}".replace(JARGON, "an object")
    return ApiError(message, param=param)
