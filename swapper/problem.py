"""A refusal on its way to a client, and OpenAI's error envelope: the same for the model routes and for our own.

Invariant: every refusal is one sentence for a person plus a stable code for a program. Touches nothing but aiohttp's
response class.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web

from swapper.errors import SwapperError

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Problem(SwapperError):
    """A refusal, raised or returned: HTTP `status`, `code`, a sentence, headers, the members beside the sentence.

    Of the members `retry_after_s` becomes the Retry-After header too, and `param` is OpenAI's field at fault.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        **extra: object,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra
        retry = extra.get("retry_after_s")
        if isinstance(retry, int | float):
            self.headers["Retry-After"] = str(max(1, round(retry)))

    @property
    def reason(self) -> str:
        """The status in words."""
        return HTTPStatus(self.status).phrase

    def envelope(self) -> bytes:
        """OpenAI's answer: `{"error": ...}`, see `error`."""
        return b'{"error": ' + self.error() + b"}"

    def error(self) -> bytes:
        """OpenAI's error object as JSON: `{message, type, param, code}`."""
        error: dict[str, object] = {
            "message": self.detail,
            "type": _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.extra.get("param"),
            "code": self.code.replace("-", "_"),
        }
        return to_json(error)

    def problem_json(self) -> bytes:
        """The same in RFC 9457's words: `code` becomes `type`, `urn:swapper:CODE`."""
        body: dict[str, object] = {
            "type": f"urn:swapper:{self.code}",
            "title": self.reason,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }
        return to_json(body)

    def response(self, *, ours: bool = False) -> web.Response:
        """The whole HTTP answer; `ours`: on a path of our own API."""
        body, kind = self.envelope(), "application/json"
        if ours:
            body, kind = self.problem_json(), "application/problem+json"
        return web.Response(status=self.status, body=body, content_type=kind, headers=self.headers)


def to_json(body: dict[str, object]) -> bytes:
    """Undecodable bytes of a client come as lone surrogates, which no UTF-8 has: each becomes a `?`."""
    return json.dumps(body, ensure_ascii=False).encode(errors="replace")
