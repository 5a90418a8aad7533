"""What a server refuses, and how it says so."""

import ipaddress
import urllib.parse
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from megajax.inference.server.answers import error_body
from megajax.inference.server.engine_thread import NotReady, Overloaded
from megajax.inference.server.protocol import Refused

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it
RETRY_LATER = {"Retry-After": "1"}
TIMED_OUT = "the request took longer than the server allows (request_timeout_seconds); ask for fewer tokens"
HANDLED = (Refused, NotReady, Overloaded, TimeoutError, ClientDisconnect, HTTPException, Exception)


async def refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with one of the HANDLED. Starlette raises what is no more than an Exception
    again, so that uvicorn logs it."""
    match error:
        case Refused():
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            return _answer(error.status, str(error), error.param, headers)
        case Overloaded():
            return _answer(429, str(error), headers=RETRY_LATER)
        case NotReady():
            return _answer(503, str(error), headers=RETRY_LATER)
        case TimeoutError():
            return _answer(503, TIMED_OUT)
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case HTTPException():
            return _answer(error.status_code, error.detail, headers=error.headers)
    return _answer(500, f"{type(error).__name__} in the server; its log has more")


def _answer(status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_body(status, message, param), status, headers=headers)


class Gate:
    """Refuses requests that a page of another site may have sent, and those whose length is in doubt.

    A server that is bound to this machine alone is asked by an address of this machine. The page of a site whose name
    is made to mean such an address (DNS rebinding) asks by the name.
    """

    def __init__(self, app: ASGIApp, host: str):
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(Headers(scope=scope)) if scope["type"] == "http" else None
        answer = JSONResponse(error_body(400, wrong), 400, headers={"Connection": "close"}) if wrong else self._app
        await answer(scope, receive, send)

    def _wrong(self, headers: Headers) -> str | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            return "the headers Content-Length and Transfer-Encoding contradict each other; send one of them"
        asked = headers.get("host", self._host)
        if _is_loopback(self._host) and not _is_loopback(asked):
            return (
                f"the header Host: {asked[:100]!r} is not an address of this machine, to which the server is bound; "
                f"ask http://{self._host}, or start the server with --host=0.0.0.0"
            )
        return None


def _is_loopback(host: str) -> bool:
    """host: with or without a port."""
    try:
        is_bare = host.count(":") > 1 and "[" not in host
        name = host if is_bare else urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
