"""The HTTP side: routes, keys, limits, and errors as OpenAI words them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from gsm.engine import Engine
from gsm.errors import EngineDead, GsmError
from gsm.integrations.transformers.grading import Lowered
from gsm.serve.admin import add_admin
from gsm.serve.answer import Answer, Prompt
from gsm.serve.errors import ApiError, translate
from gsm.serve.limits import BodyLimit
from gsm.serve.live import Live
from gsm.serve.metrics import Metrics
from gsm.serve.page import add_page
from gsm.serve.protocol import ChatRequest, CompletionRequest
from gsm.serve.reload import ConfigFile
from gsm.serve.rollout import Rollout
from gsm.serve.settings import ServeSettings
from gsm.serve.tokens import Tokens
from gsm.serve.worker import Call, EngineWorker

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Server:
    """What the routes share: the engine's thread, which config is live, tokens, metrics, settings.

    `make_rollout` and `config_file` are given by `gsm serve`; without them nothing is kept or watched.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServeSettings,
        make_rollout: Callable[[EngineWorker], Rollout] = Rollout,
        config_file: ConfigFile | None = None,
    ) -> None:
        self.settings = settings
        self.live = Live(engine)
        self.worker = EngineWorker(engine, self.live.note_step)
        self.rollout = make_rollout(self.worker)
        self.rollout.on_facts = self.live.note
        self.config_file = config_file
        self.tokens = Tokens(engine.loaded)
        self.metrics = Metrics(engine, settings.model_name, self.rollout)
        self.created = int(time.time())
        self.is_draining = False

    @property
    def retry_after_s(self) -> int:
        """When it is worth trying again: what waits now, at the pace of the last steps."""
        engine = self.worker.engine
        per_step_s = engine.stats.step_s / max(1, engine.stats.num_steps)
        return max(1, min(60, round(len(engine.scheduler.waiting) * per_step_s * 8)))

    def cancel(self, request_id: str) -> None:
        with contextlib.suppress(EngineDead):
            self.worker.cancel(request_id)

    async def chat(self, body: ChatRequest, tenant: str, session: str | None = None) -> Answer:
        """Prompt and engine call of a chat request, not begun yet. Raises ApiError."""
        self.check_model(body.model)
        salt = _salt(tenant, body.cache_salt)
        template: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.tools and body.tool_choice != "none":
            template["tools"] = body.tools
        if body.reasoning_effort is not None:
            template["reasoning_effort"] = body.reasoning_effort
        messages = [message.for_template() for message in body.messages]
        settings = body.gsm.prompt if body.gsm is not None and body.gsm.prompt is not None else None
        settings = settings or self.worker.engine.config.prompt
        text, ids, ranges, num_removed = await self.tokens.prompt(messages, salt, settings, **template)
        lowered = Lowered(ranges, settings.history.tier, len(ids)) if ranges else None
        prompt = Prompt(text, ids, lowered, num_removed)
        return self._answer(body, [prompt], body.wanted_tokens, body.num_logprobs, tenant, salt, session)

    async def complete(self, body: CompletionRequest, tenant: str, session: str | None = None) -> Answer:
        """The same for a completions request, which may hold several prompts."""
        self.check_model(body.model)
        salt = _salt(tenant, body.cache_salt)
        if not 0 < len(body.prompts) <= self.settings.max_prompts:
            raise ApiError(400, f"prompt holds {len(body.prompts)} prompts; give 1 to {self.settings.max_prompts}")
        prompts = []
        for prompt in body.prompts:
            prompts.append(
                Prompt(*await self.tokens.text(prompt, salt)) if isinstance(prompt, str) else Prompt("", prompt)
            )
        wanted = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        return self._answer(body, prompts, wanted, body.logprobs, tenant, salt, session)

    def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[Prompt],
        wanted_tokens: int | None,
        logprobs: int | None,
        tenant: str,
        salt: str,
        session: str | None,
    ) -> Answer:
        engine = self.worker.engine
        calls: list[Call] = []
        identity = f"{tenant}\0{session or body.user or tenant or uuid.uuid4().hex}"
        epoch, is_scored = self.rollout.admit(identity)  # one for the whole answer
        for prompt in prompts:
            self._check_prompt(len(prompt.ids))
            most = max(1, engine.longest_answer(len(prompt.ids)))
            sampling = body.sampling(wanted_tokens or most, logprobs, engine.loaded.arch.vocab_size)
            sparse = body.gsm.sparse if body.gsm is not None else None
            waits_as = tenant or body.user or ""
            scored = is_scored and not calls and sparse is None  # settings of its own say nothing about the epoch's
            effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
            call = Call(uuid.uuid4().hex, prompt.ids, sampling, sparse, waits_as, salt, epoch, scored)
            calls.append(replace(call, effort=effort, lowered=prompt.lowered))
        return Answer(self, body, prompts, calls)

    def check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            raise ApiError(404, f"model {name!r} is not served; this is {self.settings.model_name!r}", param="model")

    def _check_prompt(self, num_tokens: int) -> None:
        limit = self.settings.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            raise ApiError(400, f"the prompt has {num_tokens} tokens but at most {limit} are allowed; shorten it")


def _salt(tenant: str, cache_salt: str | None) -> str:
    """Who shares prefix pages: requests of one key with the same salt. Length-prefixed, so that parts never mix."""
    return f"{len(tenant)}:{tenant}{cache_salt or ''}"


def create_app(server: Server) -> FastAPI:
    """The ASGI application; the engine's thread runs from its start-up to its shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        watching = asyncio.create_task(server.config_file.watch(server.rollout)) if server.config_file else None
        yield
        server.is_draining = True
        if watching is not None:
            watching.cancel()
        await asyncio.to_thread(server.worker.stop)
        server.tokens.close()

    app = FastAPI(title="GSM", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=server.settings.max_body_bytes)
    _add_errors(app, server)
    _add_generation(app, server)
    _add_information(app, server)
    add_admin(app, server.settings, server.rollout)
    add_page(app, server)
    return app


def _tenant(request: Request) -> str:
    server: Server = request.app.state.server
    found = server.settings.tenant_of(request.headers.get("authorization"))
    if found is None:
        raise ApiError(401, "the API key is missing or wrong; send it as bearer token", "authentication_error")
    return found


def _add_generation(app: FastAPI, server: Server) -> None:
    app.state.server = server

    async def generate(request: Request, body: Any, prepare: Callable[..., Awaitable[Answer]], who: str) -> Response:
        if server.is_draining:
            raise ApiError(503, "the server is shutting down; try another one", "server_error", retry_after_s=5)
        answer = await prepare(body, who, request.headers.get("x-gsm-session"))
        await answer.begin()
        if body.stream:
            return StreamingResponse(answer.stream(), headers=answer.headers, media_type="text/event-stream")
        return await _unless_gone(request, answer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest, who: str = Depends(_tenant)) -> Response:
        return await generate(request, body, server.chat, who)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest, who: str = Depends(_tenant)) -> Response:
        return await generate(request, body, server.complete, who)


def _add_information(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", dependencies=[Depends(_tenant)])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(server)]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(_tenant)])
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return _model_card(server)

    @app.get("/health")
    async def health() -> Response:
        reason = "the server is shutting down" if server.is_draining else server.worker.why_dead
        if reason is not None:
            return JSONResponse({"status": "unavailable", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _unless_gone(request: Request, answer: Answer) -> Response:
    """The whole answer, or nothing when the client goes away first."""
    working, watching = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=499)
        return JSONResponse(working.result(), headers=answer.headers)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            answer.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model_card(server: Server) -> dict[str, Any]:
    engine = server.worker.engine
    name = server.settings.model_name
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "gsm",
        "root": engine.loaded.name,
        "max_model_len": engine.max_context,
    }


def _add_errors(app: FastAPI, server: Server) -> None:
    def respond(error: ApiError) -> Response:
        server.metrics.note_rejection(error.status)
        return JSONResponse(error.body, error.status, error.headers)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return respond(error)

    async def gsm_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, GsmError)
        return respond(translate(error, server.retry_after_s))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return respond(ApiError(400, message, param=where or None))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return respond(ApiError(error.status_code, str(error.detail)))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(GsmError, gsm_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
