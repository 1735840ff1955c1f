"""The admin API: which config is live. Off unless an admin key is set; API keys do not open it.

    GET  /admin/config      the config new requests get        PUT  /admin/config    {"config": ...} for everybody
    GET  /admin/epochs      every epoch, weights, evidence     POST /admin/canary    {"config": ..., "weight": 10}
    POST /admin/promote     the canary becomes stable          POST /admin/rollback  {"reason": ...}

A wrong or missing key is answered with 401 before anything of the request but its path and key is looked at.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from gsm.config import GsmConfig, load_config
from gsm.errors import ConfigError, GsmError
from gsm.serve.errors import ApiError
from gsm.serve.rollout import Rollout
from gsm.serve.settings import ServeSettings
from gsm.serve.state import Record


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReloadBody(_Body):
    """`config` is what a config file holds."""

    config: dict[str, Any]


class CanaryBody(_Body):
    """Without `config` the weight of the running canary changes. `weight` in percent."""

    config: dict[str, Any] | None = None
    weight: float = Field(ge=0, le=100)


class PromoteBody(_Body):
    """`epoch` guards against promoting another canary than the one that was looked at."""

    epoch: int | None = None


class RollbackBody(_Body):
    reason: str = Field(default="by hand", max_length=500)


class AdminGate:
    """ASGI middleware: nothing below /admin is reached without the key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/admin"):
            given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            if not self._settings.is_admin(given):
                await _refuse(send)
                return
        await self._app(scope, receive, send)


async def _refuse(send: Send) -> None:
    error = ApiError(401, "the admin key is missing or wrong; send it as bearer token", "authentication_error")
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})


def add_admin(app: FastAPI, settings: ServeSettings, rollout: Rollout) -> None:
    """Add the routes, unless no admin key is set."""
    if not settings.admin_keys:
        return
    app.add_middleware(AdminGate, settings=settings)
    router = APIRouter(prefix="/admin")

    async def change(source: str, values: dict[str, Any] | None, weight: float | None) -> dict[str, Any]:
        try:
            config: GsmConfig | None = None if values is None else load_config(values)
            if weight is None:
                assert config is not None
                return _said(rollout, await rollout.reload(config, source))
            return _said(rollout, await rollout.canary(config, weight, source))
        except ConfigError as error:
            rollout.refuse(source, error)
            raise ApiError(400, str(error), param="config") from None

    @router.get("/config")
    async def config() -> dict[str, Any]:
        return _said(rollout, rollout.record(rollout.live.leading.number))

    @router.put("/config")
    async def reload(body: ReloadBody) -> dict[str, Any]:
        return await change("admin", body.config, None)

    @router.post("/canary")
    async def canary(body: CanaryBody) -> dict[str, Any]:
        return await change("admin", body.config, body.weight)

    @router.post("/promote")
    async def promote(body: PromoteBody | None = None) -> dict[str, Any]:
        return _done(rollout, lambda: rollout.promote("by hand", body.epoch if body is not None else None))

    @router.post("/rollback")
    async def rollback(body: RollbackBody | None = None) -> dict[str, Any]:
        try:
            return _said(rollout, await rollout.rollback((body or RollbackBody()).reason))
        except GsmError as error:
            raise ApiError(409, str(error)) from None

    @router.get("/epochs")
    async def epochs() -> dict[str, Any]:
        return rollout.describe(with_configs=True)

    app.include_router(router)


def _done(rollout: Rollout, action: Any) -> dict[str, Any]:
    try:
        return _said(rollout, action())
    except GsmError as error:
        raise ApiError(409, str(error)) from None


def _said(rollout: Rollout, record: Record) -> dict[str, Any]:
    live = rollout.live
    is_canary = live.canary is not None and live.canary.number == record.number
    return {
        "epoch": record.number,
        "status": record.status,
        "weight": live.weight if is_canary else 100.0 if live.stable.number == record.number else 0.0,
        "reason": record.reason,
        "config": record.config,
    }
