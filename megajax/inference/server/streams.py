"""Answers that a client reads while they are generated, or does not wait for."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megajax.inference.server import protocol
from megajax.inference.server.answers import Answer, as_event, error_body
from megajax.inference.server.engine_thread import Generation, NotReady
from megajax.inference.server.refusals import CLIENT_CLOSED_REQUEST, TIMED_OUT


async def answered(
    generation: Generation, answer: Answer, body: protocol.Request | protocol.ResponsesRequest
) -> Response:
    if body.stream:
        return _EventStream(answer.events(body.wants_usage), generation)
    with generation:
        return JSONResponse(await answer.whole())


class _EventStream(StreamingResponse):
    """Cancels the generation if the client goes away, or does not read."""

    def __init__(self, events: AsyncIterator[str], generation: Generation):
        super().__init__(_with_errors(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await super().__call__(scope, receive, send)


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The status has been sent already, so an error becomes the last event."""
    try:
        async for event in events:
            yield event
    except NotReady as error:
        yield as_event(error_body(503, str(error)))
    except TimeoutError:
        yield as_event(error_body(503, TIMED_OUT))


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer is abandoned when the client goes away."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
