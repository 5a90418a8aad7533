"""Logs a line for each request: when it ended, who asked, what, the status, tokens of the prompts + generated, seconds.

/health and /metrics are left out: whoever watches the server asks them every few seconds.
"""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megajax.terminal.one_line import printable

logger = logging.getLogger("megajax")

UNLOGGED = ("/health", "/metrics")
MOST_CHARACTERS = 200  # of a path


class RequestLog:
    """Middleware. What generates text leaves its Generation in the `generation` of the request's state."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLOGGED:
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status = 500  # if an error prevents any answer

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _log(scope, status, time.monotonic() - begin)


def _log(scope: Scope, status: int, seconds: float) -> None:
    generation = scope.get("state", {}).get("generation")
    num_prompt = generation.num_prompt_tokens if generation else 0
    num_generated = generation.num_generated if generation else 0
    client = scope["client"][0] if scope.get("client") else "-"
    asked = printable(f"{client} {scope['method']} {scope['path'][:MOST_CHARACTERS]}")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    logger.info("%s %s %d, %d + %d tokens, %.2f s", now, asked, status, num_prompt, num_generated, seconds)
