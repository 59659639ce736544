"""Errors of the API, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from thinker.runtime.checks import finite_json

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is refused. `param`: the field at fault; `code`: a short name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            headers,
        )

    @property
    def content(self) -> dict[str, dict[str, str | None]]:
        """The body of the response."""
        kind = TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        """The whole response."""
        return json_response(self.content, self.status, self.headers)


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(finite_json(content), status, headers, "application/json")


def event(content: object) -> bytes:
    """A server-sent event."""
    return f"data: {content if isinstance(content, str) else finite_json(content)}\n\n".encode()
