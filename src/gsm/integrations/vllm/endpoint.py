"""Routes beside vLLM's own: read and replace the config on every rank, and metrics under `gsm:`.

`GET /v1/gsm/config` what every rank works by; `POST /v1/gsm/config` takes a config (JSON); `GET /metrics` vLLM's
metrics with ours after them. The first two are behind vLLM's `--api-key`. vLLM loads them only where `VLLM_PLUGINS`
names `gsm_admin` (and `gsm`, since the variable is a list of all that may load).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import State

from gsm.config import load_config
from gsm.errors import ConfigError
from gsm.integrations.vllm.live import check, refuse_restart
from gsm.integrations.vllm.metrics import render

logger = logging.getLogger("vllm.gsm")


class GsmEndpoint:
    """An `EndpointPlugin` of vLLM."""

    name = "gsm_admin"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/v1/gsm/config", self.read, methods=["GET"])
        app.add_api_route("/v1/gsm/config", self.replace, methods=["POST"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        self.engine = engine_client

    async def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """One answer per rank of every data-parallel engine."""
        core = getattr(self.engine, "engine_core", None)
        everywhere = getattr(core, "call_utility_all_async", None)
        if everywhere is None:
            answers: list[dict[str, Any]] = await self.engine.collective_rpc(method, args=args)
            return answers
        engines = await everywhere("collective_rpc", method, None, args, None)
        return [answer for engine in engines for answer in engine]

    async def read(self) -> JSONResponse:
        return JSONResponse({"ranks": await self.call("gsm_status")})

    async def replace(self, request: Request) -> JSONResponse:
        """All ranks or none: the config is checked against what runs before the first rank hears of it."""
        try:
            new = load_config(await request.json())
            ranks = await self.call("gsm_status")
            old = load_config(ranks[0]["config"])
            check(new)
            refuse_restart(old, new)
        except ConfigError as error:
            return _refused(str(error), 409 if "restart" in str(error) else 400)
        except ValueError:
            return _refused("the body is not JSON; send the config as a JSON object", 400)
        answers = await self.call("gsm_reload", new.model_dump(mode="json", exclude_unset=True))
        failed = [f"rank {answer['rank']}: {answer['error']}" for answer in answers if "error" in answer]
        if failed:
            await self.call("gsm_reload", old.model_dump(mode="json"))
            return _refused("; ".join(failed) + "; every rank has its former config again", 500)
        if new.smoothing != old.smoothing:  # stored keys and values came from smoothed activations
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        return JSONResponse({"ranks": answers})

    async def metrics(self) -> Response:
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        try:
            own = render(await self.call("gsm_status"))
        except Exception:  # an engine without a GSM config, or without our worker extension: vLLM's metrics remain
            logger.debug("no GSM metrics", exc_info=True)
            own = ""
        return Response(
            generate_latest(get_prometheus_registry()) + own.encode(), media_type="text/plain; version=0.0.4"
        )


def _refused(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def make_plugin() -> GsmEndpoint:
    """The entry point."""
    return GsmEndpoint()
