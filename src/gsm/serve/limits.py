"""Bodies larger than the limit are refused before they are read into memory."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gsm.serve.errors import ApiError


class _TooLarge(Exception):
    pass


class BodyLimit:
    """ASGI middleware: counts what really arrives, whatever Content-Length says."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, has_answered, is_too_large = 0, False, False

        async def counted() -> Message:
            nonlocal num_bytes, is_too_large
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                is_too_large = True
                raise _TooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal has_answered
            if is_too_large and not has_answered:
                return  # the framework takes our exception for a malformed body; `_refuse` says what it was
            has_answered = True
            await send(message)

        try:
            if self._announced(scope) > self._max_bytes:
                raise _TooLarge
            await self._app(scope, counted, noted)
        except _TooLarge:
            is_too_large = True
            if has_answered:
                raise
        if is_too_large and not has_answered:
            await self._refuse(send)

    @staticmethod
    def _announced(scope: Scope) -> int:
        value = dict(scope["headers"]).get(b"content-length", b"0")
        return int(value) if value.isdigit() else 0

    async def _refuse(self, send: Send) -> None:
        error = ApiError(413, f"the body is larger than {self._max_bytes} bytes; send less")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})
