"""What a client is told when something goes wrong: status code and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from gsm.errors import ConfigError, EngineDead, GsmError, InputError, QueueFull


class ApiError(Exception):
    """Answer with `status` and OpenAI's error object. Never leaves this package."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": _printable(self.message),
                "type": self.kind,
                "param": _printable(self.param),
                "code": self.status,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def _printable(text: str | None) -> str | None:
    """Names of fields come from the client and may hold what UTF-8 cannot."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def translate(error: GsmError, retry_after_s: int) -> ApiError:
    """The answer to an error of the engine."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), "rate_limit_error", retry_after_s=retry_after_s)
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), "server_error", retry_after_s=retry_after_s)
    if isinstance(error, (InputError, ConfigError)):
        return ApiError(400, str(error))
    return ApiError(500, str(error), "server_error")


def ended(reason: str, message: str | None, retry_after_s: int) -> ApiError:
    """The answer to a request that the engine ended without a result."""
    text = message or "the request was aborted"
    if reason == "timeout":
        return ApiError(503, text, "server_error", retry_after_s=retry_after_s)
    return ApiError(500, text, "server_error")
