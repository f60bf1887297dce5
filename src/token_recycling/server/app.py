"""The HTTP interface: OpenAI's endpoints, health, metrics and the chat page."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from token_recycling.server.answering import Answering, or_gone
from token_recycling.server.body import parsed
from token_recycling.server.choices import ChatChoice, TextChoice, TokenTexts
from token_recycling.server.engine import Engine
from token_recycling.server.errors import ApiError, add_handlers
from token_recycling.server.faults import Faults
from token_recycling.server.job import Answer, Ended, NewTokens
from token_recycling.server.middleware import Authentication, BodyLimit
from token_recycling.server.prompts import Prompts
from token_recycling.server.schemas import ChatRequest, CompletionRequest, SamplingFields
from token_recycling.server.tools import Json
from token_recycling.util.memory import give_back

READ = ["GET", "HEAD"]
LARGE = 2**16  # bytes of a body
R = TypeVar("R", ChatRequest, CompletionRequest)
Choices = Sequence[ChatChoice | TextChoice]  # those of a request that are being written
PAGE = Path(__file__).parent / "static" / "chat.html"


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
        self._model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "token-recycling",
            "max_model_len": self.prompts.context,
        }
        self._large = CapacityLimiter(1)

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
        choices = [
            ChatChoice(index, self._texts, answer.parser) for index, answer in enumerate(answers)
        ]
        top = (body.top_logprobs or 0) if body.logprobs else None
        answering = Answering(self.engine, answers, request, body.n or 1, top)
        kinds = "chat.completion", "chat.completion.chunk"
        return await self._answer(request, body, answering, choices, "chatcmpl", *kinds)

    async def complete(self, request: Request) -> Response:
        """Answer a completion request."""
        body, answers = await self._read(request, CompletionRequest, self.prompts.of_completion)
        choices = [TextChoice(index, self._texts) for index in range(len(answers))]
        answering = Answering(self.engine, answers, request, body.n or 1, body.logprobs)
        kind = "text_completion"
        return await self._answer(request, body, answering, choices, "cmpl", kind, kind)

    async def _answer(
        self,
        request: Request,
        body: SamplingFields,
        answering: Answering,
        choices: Choices,
        prefix: str,
        kind: str,
        kind_of_chunk: str,
    ) -> Response:
        try:
            if not body.stream:
                await or_gone(request, _collect(answering, choices))
                whole = [choice.whole() for choice in choices]
                envelope = self._envelope(prefix, kind)
                return JSONResponse({**envelope, "choices": whole, "usage": answering.usage()})
            # An answer that is refused gets a status of its own, so wait for the first event.
            first = await or_gone(request, answering.next())
        except BaseException:
            answering.close()
            raise
        envelope = self._envelope(prefix, kind_of_chunk)
        return StreamingResponse(
            _stream(answering, choices, envelope, body, first),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    def _envelope(self, prefix: str, kind: str) -> Json:
        """Return what all chunks of an answer have in common."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex[:24]}",
            "object": kind,
            "created": int(time.time()),
            "model": self._name,
        }

    async def models(self) -> Json:
        """Return OpenAI's list of models."""
        return {"object": "list", "data": [self._model]}

    async def model(self, name: str) -> Json:
        """Return the entry of a model.

        Raises:
            ApiError: it is not the one that is served.
        """
        self._check_model(name)
        return self._model

    async def about(self) -> Json:
        """Return what the page shows."""
        return {"model": self._name, "needs_key": bool(self.keys), **self._about}

    async def health(self) -> Response:
        """Return whether requests are decoded."""
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        text = self.engine.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _collect(answering: Answering, choices: Choices) -> None:
    """Wait for the end of all answers."""
    while answering.left:
        index, event = await answering.next()
        choices[index].chunk(event)


async def _stream(
    answering: Answering,
    choices: Choices,
    envelope: Json,
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
                yield _frame({**envelope, "choices": [chunk], **others})
        index, event = first
        while True:
            chunk = choices[index].chunk(event)
            if chunk is not None or with_drafts:
                frame = {**envelope, "choices": [] if chunk is None else [chunk], **others}
                if with_drafts:
                    frame["token_recycling"] = _drafts(event)
                yield _frame(frame)
            if not answering.left:
                break
            index, event = await answering.next()
        if with_usage:
            yield _frame({**envelope, "choices": [], "usage": answering.usage()})
        yield _frame("[DONE]")
    except ApiError as error:
        yield _frame(error.body)
    finally:
        answering.close()


def _drafts(event: NewTokens | Ended) -> Json:
    """Return what ``include_drafts`` adds to a chunk."""
    if isinstance(event, Ended):
        return {"mat": event.stats.mat, "tokens_per_second": event.stats.tokens_per_second}
    return {"drafts": list(zip(event.pieces, event.drafted))}


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

    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.api_route("/health", methods=READ)(server.health)
    app.api_route("/metrics", methods=READ)(server.metrics)
    app.api_route("/about", methods=READ)(server.about)

    @app.api_route("/", methods=READ, response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    return app
