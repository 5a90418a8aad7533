"""HTTP connections that end: clients that do not send, or do not read, are disconnected.

uvicorn has a time limit for idle connections only.
"""

import logging
import math
import resource

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("megajax")

HEADER_SECONDS = 10.0
"""For the header of a request, and for the rest of a body that was refused."""
KEEP_ALIVE_SECONDS = 8
"""Between two requests. Clients should close first, or a request meets a connection that is just being closed: httpx,
and OpenAI's client with it, closes after 5 s."""
BODY_SECONDS = 30.0
SEND_SECONDS = 30.0
"""A client reads nothing for longer."""
ANSWER_SECONDS = 2
"""For what follows the deadline of a request: its error."""
STOP_SECONDS = 5
"""A stop waits longer than the deadline of all requests by this time, in which the connections above end."""
WATCH_SECONDS = 1.0
MAX_CONNECTIONS = 2048
FILES_PER_CONNECTION = 2  # allowed to be open: the process needs some too


def uvicorn_config(app: ASGIApp, request_timeout_seconds: float, **options) -> uvicorn.Config:
    """request_timeout_seconds: the application answers each request within this time."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(request_timeout_seconds) + STOP_SECONDS,
        **options,
    )


def allow_connections() -> None:
    """Raises the limit of open files of this process, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_PER_CONNECTION * MAX_CONNECTIONS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("ulimit -n %d leaves room for fewer than %d connections", allowed, MAX_CONNECTIONS)


class Connection(H11Protocol):
    """Looks once a second how long it has been waiting for the same thing."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._waits_for = HEADER_SECONDS, None
        self._since = self.loop.time()
        self._unsent = 0
        self._sent_at = self._since
        self._watching = self.loop.call_later(WATCH_SECONDS, self._watch)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watching.cancel()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Ends the connection that has been waiting for a request for the longest time."""
        waiting = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each._limit() == HEADER_SECONDS and not each.transport.is_closing()
        ]
        min(waiting, key=lambda each: each._since).transport.abort()

    def _limit(self) -> float:
        """How long the connection may wait for what it waits for now."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return HEADER_SECONDS if is_answered else BODY_SECONDS
        if is_answered and not self.transport.get_write_buffer_size():
            return HEADER_SECONDS
        return (self.config.timeout_graceful_shutdown or 0) - STOP_SECONDS + ANSWER_SECONDS

    def _watch(self) -> None:
        now = self.loop.time()
        limit = self._limit()
        if (limit, self.cycle) != self._waits_for:
            self._waits_for = limit, self.cycle
            self._since = now
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._sent_at = now
        self._unsent = unsent
        if now - self._since > limit or now - self._sent_at > SEND_SECONDS:
            self.transport.abort()
        else:
            self._watching = self.loop.call_later(WATCH_SECONDS, self._watch)
