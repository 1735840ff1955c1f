"""The live page at `/`: one HTML file, one script, one style sheet, nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response

from gsm.errors import EngineDead

if TYPE_CHECKING:
    from gsm.serve.app import Server

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_KINDS = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css"}


def add_page(app: FastAPI, server: Server) -> None:
    """Add `/`, its two files, and `/live`, the numbers it shows."""

    def send(name: str) -> Response:
        content = (files(__package__) / name).read_text(encoding="utf-8")
        return Response(content, media_type=f"{_KINDS[name]}; charset=utf-8", headers=_HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return send("index.html")

    @app.get("/page/app.js", include_in_schema=False)
    async def script() -> Response:
        return send("app.js")

    @app.get("/page/app.css", include_in_schema=False)
    async def style() -> Response:
        return send("app.css")

    @app.get("/live")
    async def live() -> dict[str, Any]:
        """What `/metrics` says too, over the last 15 minutes, and the epochs without their configs."""
        try:
            if not server.worker.engine.has_work:
                await server.worker.call(server.live.look)
        except EngineDead:
            pass  # the last numbers are still true
        return {
            "model": server.settings.model_name,
            "health": server.worker.why_dead or "ok",
            "has_admin": bool(server.settings.admin_keys),
            "needs_key": bool(server.settings.api_keys),
            "is_chat": server.tokens.has_template,
            **server.live.describe(),
            "rollout": server.rollout.describe(with_configs=False),
        }
