"""A server that only embeds texts: /v1/embeddings, in OpenAI's form."""

import asyncio
import base64
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megajax.inference.server import protocol
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.engine_thread import NotReady, check_room
from megajax.inference.server.service import Service, get, post
from megajax.inference.text_encoder import TextEncoder

logger = logging.getLogger("megajax")

MAX_LENGTH = 8192
"""Tokens of a text, for a model without a limit."""
TURN = 64
"""Texts that are computed before another request has its turn."""


class Embedded(NamedTuple):
    """What the log says of a request."""

    num_prompt_tokens: int
    num_generated: int = 0


def make_embedding_app(
    encoder: TextEncoder,
    config: ServerConfig,
    max_length: int | None = None,
    on_failure: Callable[[], None] | None = None,
) -> Starlette:
    """The ASGI application. max_length: tokens of a text; default: what the model reads. on_failure: called if the
    first text cannot be embedded. Its state.is_ready() says whether it has been."""
    return EmbeddingServer(encoder, config, max_length, on_failure).app


class EmbeddingServer(Service):
    """One thread computes the texts of all requests, at most TURN of one request at a time."""

    def __init__(
        self,
        encoder: TextEncoder,
        config: ServerConfig,
        max_length: int | None,
        on_failure: Callable[[], None] | None,
    ):
        limits = [limit for limit in (encoder.model.config.max_length, max_length) if limit is not None]
        super().__init__(config, encoder.tokenizer, min(limits, default=MAX_LENGTH))
        self._encoder = encoder
        self._on_failure = on_failure
        self._is_ready = False
        self._num_open = 0  # texts that wait or are computed
        self._device = ThreadPoolExecutor(1, "encoder")
        routes = [
            get("/health", self.health),
            post("/v1/embeddings", self._guarded(self._timed(self.embeddings))),
        ]
        self.app = self._make(routes, self._lifespan, lambda: self._is_ready)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        warm_up = asyncio.create_task(self._warm_up())
        yield
        warm_up.cancel()
        self._long_work.shutdown(wait=False, cancel_futures=True)
        self._device.shutdown(cancel_futures=True)

    async def _warm_up(self) -> None:
        try:
            await self._vectors([[0]])
        except Exception:
            logger.exception("the model cannot embed")
            if self._on_failure is not None:
                self._on_failure()
        else:
            self._is_ready = True
            logger.info("ready")

    def _check_ready(self) -> None:
        if not self._is_ready:
            raise NotReady("the model is warming up; try again later")

    async def health(self, request: Request) -> Response:
        self._check_ready()
        return JSONResponse({"status": "ready"})

    async def embeddings(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.EmbeddingRequest, content)
        self._checked_model(body.model)
        self._check_ready()
        with protocol.refusing_values():
            check_room(self._num_open, len(body.input), self.config.max_requests)
        self._num_open += len(body.input)
        try:
            return JSONResponse(await self._answer(request, body))
        finally:
            self._num_open -= len(body.input)

    async def _answer(self, request: Request, body: protocol.EmbeddingRequest) -> dict[str, Any]:
        for text in body.input:
            self._check_characters(len(text), "input")
        tokens, lengths = await self._work(sum(map(len, body.input)), self._read, body.input)
        request.state.generation = Embedded(sum(lengths))
        vectors = await self._vectors(tokens)
        encode = _as_base64 if body.encoding_format == "base64" else np.ndarray.tolist
        data = [
            {"object": "embedding", "index": number, "embedding": encode(vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
        return {"object": "list", "data": data, "model": self.config.model_name, "usage": usage}

    def _read(self, texts: list[str] | list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """-> (tokens of each text, how many the model reads of it). Raises ValueError for what it cannot read."""
        tokens = [self.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
        lengths = self._encoder.lengths(tokens)
        if max(lengths) > self._max_length:
            raise ValueError(
                f"text {lengths.index(max(lengths)) + 1} has {max(lengths)} tokens; this server reads "
                f"{self._max_length}: shorten or split it"
            )
        return tokens, lengths

    async def _vectors(self, texts: list[list[int]]) -> np.ndarray:
        """float32 [texts, D] of length 1."""
        loop = asyncio.get_running_loop()
        embed = functools.partial(self._encoder.embed_tokens, pooling=self.config.pooling)
        parts = []
        for begin in range(0, len(texts), TURN):
            parts.append(await loop.run_in_executor(self._device, embed, texts[begin : begin + TURN]))
        vectors = np.concatenate(parts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _as_base64(vector: np.ndarray) -> str:
    """Of its float32 numbers, the first byte the lowest."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
