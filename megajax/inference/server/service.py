"""What every server has: keys, limits of requests, deadlines, and the name of its model."""

import asyncio
import functools
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from megajax.data.tokenizers.tokenizer import Tokenizer, longest_token
from megajax.inference.server import protocol
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.protocol import Refused, parse, refusing_values
from megajax.inference.server.refusals import HANDLED, Gate, refusal
from megajax.inference.server.request_log import RequestLog
from megajax.inference.server.streams import unless_disconnected

# Work on more characters than this is done one after the other, so that it does not keep short requests waiting.
LONG_WORK = 1 << 14
# After reading a long body, which nothing can interrupt, the server does other things for this many times as long.
PAUSE = 3

get = functools.partial(Route, methods=["GET"])
post = functools.partial(Route, methods=["POST"])


class Service:
    """The base of servers."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer, max_length: int):
        """max_length: tokens of a text."""
        self.config = config
        self.tokenizer = tokenizer
        self._keys = [key.encode() for key in config.api_keys]
        self._created = int(time.time())
        self._models = [config.model_name]
        """Names that requests may give."""
        self._max_length = max_length
        self._max_characters = max_length * longest_token(tokenizer)
        self._long_work = ThreadPoolExecutor(1, "long work")

    def _make(self, routes: list[Route], lifespan: Lifespan, is_ready: Callable[[], bool]) -> Starlette:
        """The ASGI application. is_ready: becomes that of its state."""
        log = [Middleware(RequestLog)] if self.config.log_requests else []
        app = Starlette(
            routes=[
                *routes,
                get("/v1/models", self._guarded(self.models)),
                get("/v1/models/{name:path}", self._guarded(self.model)),
            ],
            middleware=[*log, Middleware(Gate, host=self.config.host)],
            exception_handlers=dict.fromkeys(HANDLED, refusal),
            lifespan=lifespan,
        )
        app.state.is_ready = is_ready
        return app

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]):
        async def guarded(request: Request) -> Response:
            request.state.client = self._check_key(request)
            # What a page of another origin can send without this server's permission has another type.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise Refused(415, "the header Content-Type must be application/json")
            return await endpoint(request)

        return guarded

    def _timed(self, endpoint: Callable[[Request, bytes], Coroutine[Any, Any, Response]]):
        """Everything up to the answer, or to the beginning of a stream, happens before the deadline, and only while the
        client is there."""

        async def timed(request: Request) -> Response:
            async with asyncio.timeout(self.config.request_timeout_seconds) as timeout:
                request.state.deadline = timeout.when()
                body = await self._body(request)
                return await unless_disconnected(request, endpoint(request, body))

        return timed

    def _check_key(self, request: Request) -> Hashable:
        """-> who asks: the number of the key, or without keys the address."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # compares with all keys, each in constant time
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if self._keys and not (any(found) and scheme.lower() == "bearer"):
            raise Refused(401, "the header Authorization: Bearer KEY with a valid key is missing")
        return found.index(True) if self._keys else request.client and request.client.host

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.config.max_body_bytes:
                raise Refused(413, f"the request is larger than the {self.config.max_body_bytes} bytes allowed")
        return bytes(body)

    async def _work(self, size: int, function: Callable, *arguments) -> Any:
        """What the function returns, called on another thread. size: about how many characters it works on. Raises
        Refused if it raises ValueError."""
        executor = self._long_work if size > LONG_WORK else None
        with refusing_values():
            return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    async def _parse(self, kind: type[protocol.Kind], body: bytes) -> protocol.Kind:
        return parse(kind, body) if len(body) <= LONG_WORK else await self._work(len(body), _parse_long, kind, body)

    def _check_characters(self, count: int, field: str) -> None:
        """Raises Refused for a text whose tokens are too many, however long they are."""
        if count > self._max_characters:
            raise Refused(
                400,
                f"{field}: {count} characters are more than {self._max_length} tokens of this model can hold "
                f"({self._max_characters}); give a shorter text",
                field,
            )

    def _checked_model(self, name: str | None) -> str:
        """The name of the model that a request names. Raises Refused for one that this server does not have."""
        if name not in (None, *self._models):
            raise Refused(404, f"the model {name} does not exist; this server has {', '.join(self._models)}", "model")
        return name or self.config.model_name

    # ------------------------------------------------------------------ the model

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._checked_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "megajax",
            "max_model_len": self._max_length,
        }


def _parse_long(kind: type[protocol.Kind], body: bytes) -> protocol.Kind:
    begin = time.monotonic()
    try:
        return parse(kind, body)
    finally:
        time.sleep(PAUSE * (time.monotonic() - begin))
