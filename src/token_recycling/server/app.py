"""The HTTP interface: OpenAI's endpoints, health, metrics and the chat page."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from token_recycling.server.answering import Answering, or_gone
from token_recycling.server.authentication import Authentication
from token_recycling.server.body import parsed
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
from token_recycling.server.engine import Engine
from token_recycling.server.errors import ApiError, add_handlers
from token_recycling.server.faults import Faults
from token_recycling.server.job import Ended, NewTokens
from token_recycling.server.prompts import Answer, Prompts
from token_recycling.server.schemas import ChatRequest, CompletionRequest, SamplingFields
from token_recycling.util.memory import give_back

READ = ["GET", "HEAD"]
LARGE = 2**16  # bytes of a body
R = TypeVar("R", ChatRequest, CompletionRequest)
PAGE = Path(__file__).parent / "static" / "chat.html"


class Choice(Protocol):
    """A choice that is being written (see ``ChatChoice``)."""

    def first_chunk(self) -> Json | None: ...  # noqa: D102
    def chunk(self, event: NewTokens) -> Json | None: ...  # noqa: D102
    def last_chunk(self, event: Ended) -> Json: ...  # noqa: D102
    def whole(self) -> Json: ...  # noqa: D102


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
        self.engine, self.keys = engine, keys
        self._name, self._about = name, about
        self.prompts = Prompts(engine.recycler)
        self._texts = TokenTexts(self.prompts.tokenizer, self.prompts.eos)
        self._created = int(time.time())
        self._large = CapacityLimiter(1)

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
        return {"model": self._name, "needs_key": bool(self.keys), **self._about}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise ApiError(
                f"the model {json.dumps(name)} does not exist; this server has "
                f"{json.dumps(self._name)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _read(
        self, request: Request, kind: type[R], answers: Callable[[R], list[Answer]]
    ) -> tuple[R, list[Answer]]:
        """Return what a request asks for, and its choices.

        Both are made in a thread; of large bodies one at a time, so that they cannot take all of
        the machine.
        """
        content, name = await request.body(), request.headers.get("content-type", "")

        def read() -> tuple[R, list[Answer]]:
            body = parsed(kind, name, content, self.prompts.context)
            self._check_model(body.model)
            return body, answers(body)

        if len(content) <= LARGE:
            return await to_thread.run_sync(read)
        try:
            return await to_thread.run_sync(read, limiter=self._large)
        finally:
            await to_thread.run_sync(give_back, limiter=self._large)

    async def chat(self, request: Request) -> Response:
        """Answer a chat request."""
        body, answers = await self._read(request, ChatRequest, self.prompts.of_chat)
        choices: list[Choice] = [
            ChatChoice(index, self._texts, answer.parser) for index, answer in enumerate(answers)
        ]
        top = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer(request, body, answers, choices, top, "chat.completion")

    async def complete(self, request: Request) -> Response:
        """Answer a completion request."""
        body, answers = await self._read(request, CompletionRequest, self.prompts.of_completion)
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
                await or_gone(request, self._collect(answering, choices, usage))
                envelope = Envelope(kind, prefix, self._name)
                return JSONResponse(
                    envelope.json([choice.whole() for choice in choices], usage=usage.json())
                )
            # An answer that is refused gets a status of its own, so wait for the first event.
            first = await or_gone(request, answering.next())
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
                    chunks = [] if chunk is None else [chunk]
                    yield _frame(envelope.json(chunks, **others, **extra))
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


def create_app(server: Server, allowed_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application that serves ``server``, to web pages of ``allowed_origins`` too."""

    # No /docs: it would load scripts from another host, and describe errors that are not ours.
    # No redirects to paths without a slash: they would name the host that the client names.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(BodyLimit)
    app.add_middleware(Authentication, keys=server.keys)
    app.add_middleware(Faults)
    if allowed_origins:  # outermost: answers to wrong keys need its headers too
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    add_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.chat(request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await server.complete(request)

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
