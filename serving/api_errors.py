"""Errors of the API, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from thinker.runtime.checks import finite_json

MAX_CHARS = 1000  # of a message
# OpenAI's names by status; its clients choose the class of their exception by the status alone.
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
        self.status = status
        self.message = _shortened(message)
        self.param = _shortened(param)
        self.code = code
        self.headers = headers

    @property
    def content(self) -> dict[str, dict[str, str | None]]:
        """The body of the response."""
        if self.status >= 500:
            kind = "server_error"
        else:
            kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole response."""
        return json_response(self.content, self.status, self.headers)


def _shortened(text: str | None) -> str | None:
    """A text that may quote a long name from a request."""
    if text is None or len(text) <= MAX_CHARS:
        return text
    return f"{text[: MAX_CHARS // 2]} ... {text[-MAX_CHARS // 2 :]}"


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(finite_json(content), status, headers, "application/json")


def event(content: object) -> bytes:
    """A server-sent event: text as it is (such as [DONE]), anything else as JSON."""
    data = content if isinstance(content, str) else finite_json(content)
    return f"data: {data}\n\n".encode()
