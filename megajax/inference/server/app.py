"""An HTTP server with OpenAI's interface, for one engine or several replicas.

Errors have OpenAI's form {"error": {message, type, param, code}}; docs/serving.md lists their status codes.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.resources
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.data.tokenizers.tokenizer import configured_tokens
from megajax.inference.engine import Engine
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.server import protocol
from megajax.inference.server.answers import ChatAnswer, CompletionAnswer, TokenTexts
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.engine_process import EngineProcess
from megajax.inference.server.engine_thread import Generation
from megajax.inference.server.fetching import Fetcher
from megajax.inference.server.metrics import Metrics
from megajax.inference.server.protocol import Refused, parse, refusing_values
from megajax.inference.server.replicas import Replicas
from megajax.inference.server.responses import ResponseAnswer
from megajax.inference.server.service import LONG_WORK, Service, get, post
from megajax.inference.server.streams import answered
from megajax.inference.server.tool_calls import find_tool_format
from megajax.inference.tokens.sampling import Sampling
from megajax.weights.sources import open_source

# The page needs nothing from elsewhere, and what a model writes must not be able to fetch anything.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def make_app(
    engines: Sequence[Engine | EngineProcess],
    config: ServerConfig,
    template: ChatTemplate | None = None,
    on_failure: Callable[[], None] | None = None,
) -> Starlette:
    """The ASGI application, which starts the threads of the engines, and stops them when everything accepted has
    finished. Its state.is_ready() says whether they have warmed up.

    engines: replicas of one model. template: None: chats are refused. on_failure: called if the engine raises an error.
    """
    return Server(engines, config, template, on_failure).app


class Server(Service):
    def __init__(
        self,
        engines: Sequence[Engine | EngineProcess],
        config: ServerConfig,
        template: ChatTemplate | None,
        on_failure: Callable[[], None] | None,
    ):
        engine = self.engine = engines[0]
        super().__init__(config, engine.prompts.tokenizer, engine.prompts.max_length)
        self._models += engine.adapters
        self.template = template
        self._tool_format = find_tool_format(template, self.tokenizer) if template else None
        self.metrics = Metrics(config.model_name, lambda: self.replicas.stats)
        self.replicas = Replicas(engines, config.max_requests, self.metrics, on_failure)
        self._texts = TokenTexts(self.tokenizer)
        self._fetcher = Fetcher(config.image_hosts, config.max_body_bytes)
        # an end without a name gets one
        self._named_tokens = {"<|endoftext|>": self.tokenizer.eod_id, **self.tokenizer.special_tokens}
        self._loading = asyncio.Lock()  # one at a time
        routes = [
            get("/", page),
            get("/health", self.health),
            get("/metrics", self.show_metrics),
            get("/tokenizer_info", self._guarded(self.tokenizer_info)),
            post("/v1/completions", self._guarded(self._timed(self.completions))),
            post("/v1/chat/completions", self._guarded(self._timed(self.chat))),
            post("/v1/responses", self._guarded(self._timed(self.responses))),
            post("/v1/embeddings", self._guarded(self.embeddings)),
            post("/v1/load", self._guarded(self.load)),
            post("/tokenize", self._guarded(self._timed(self.tokenize))),
            post("/detokenize", self._guarded(self._timed(self.detokenize))),
        ]
        self.app = self._make(routes, self._lifespan, lambda: self.replicas.is_ready)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        self.replicas.start()
        yield
        self._long_work.shutdown(wait=False, cancel_futures=True)
        await self.replicas.stop()

    # ------------------------------------------------------------------ generation

    async def completions(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.CompletionRequest, content)
        model = self._checked_model(body.model)
        max_tokens = protocol.DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise Refused(400, "max_tokens=0 generates nothing; use at least 1, or echo=true", "max_tokens")
        # without new tokens, the log-probabilities of the prompt are all that can be computed
        prompt_logprobs = (body.logprobs or 0) if body.echo and (body.logprobs is not None or max_tokens == 0) else None
        sampling = body.sampling(self.config.sampling, max_tokens, body.logprobs, prompt_logprobs)
        if prompt_logprobs is not None and max_tokens == 1:
            # Who scores a prompt reads the log-probabilities of all tokens but the last, so there must be a last one.
            sampling = dataclasses.replace(sampling, ignore_eos=True)
        prompts = [
            await self._encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in body.prompt
        ]
        generation = await self._start(request, model, prompts, sampling)
        echoed = [self._text(prompt) for prompt in body.prompt] if body.echo else None
        has_tokens = bool(body.return_token_ids)
        answer = CompletionAnswer(generation, model, self._texts, has_tokens, echoed)
        return await answered(generation, answer, body)

    async def chat(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.ChatRequest, content)
        model = self._checked_model(body.model)
        tools = body.offered_tools
        if tools and self.template and self._tool_format is None:
            raise Refused(
                400,
                "tools: the chat template writes no calls of tools, or in another form than those of Hermes, Llama 3 "
                "and Mistral, which this server reads; leave tools out",
                "tools",
            )
        demanded = body.demanded_functions
        prompt, images, room = await self._read_conversation(len(content), body.messages, tools)
        max_tokens = body.max_completion_tokens or body.max_tokens or room
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(self.config.sampling, max_tokens, logprobs)
        if demanded and self._tool_format:
            grammar = self._tool_format.grammar(demanded, self.tokenizer.token_id)
            sampling = dataclasses.replace(sampling, grammar=grammar)
        generation = await self._start(request, model, [prompt], sampling, [images])
        marker = self._tool_format.marker if tools and self._tool_format else None
        most_calls = 1 if body.parallel_tool_calls is False else None
        has_tokens = bool(body.return_token_ids)
        answer = ChatAnswer(generation, model, self._texts, has_tokens, marker, most_calls)
        return await answered(generation, answer, body)

    async def responses(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.ResponsesRequest, content)
        model = self._checked_model(body.model)
        prompt, images, room = await self._read_conversation(len(content), body.messages, None)
        sampling = body.sampling(self.config.sampling, body.max_output_tokens or room)
        generation = await self._start(request, model, [prompt], sampling, [images])
        return await answered(generation, ResponseAnswer(generation, model), body)

    async def _read_conversation(
        self, size: int, messages: list[dict], tools: list[dict] | None
    ) -> tuple[list[int], list[PromptImage], int]:
        """-> (prompt, its images, tokens that are left for an answer)."""
        prompt = await self._render(size, messages, tools, True)
        images = await self._read_images(protocol.images_of(messages))
        num_tokens = len(prompt) + sum(image.num_tokens - 1 for image in images)
        return prompt, images, max(self._max_length - num_tokens, 1)

    async def _read_images(self, given: Sequence[bytes | str]) -> list[PromptImage]:
        """given: files, and addresses, which are fetched. Raises Refused for too many images, one that cannot be
        fetched or read, and a model that reads none."""
        if not given:
            return []
        if len(given) > self.config.max_images:
            raise Refused(400, f"messages: {len(given)} images are more than {self.config.max_images}", "messages")
        with refusing_values():
            files = await self._fetcher.files(given)

        def read() -> list[PromptImage]:
            read_image = self.engine.prompts.read_image
            return [read_image(data, f"messages: image {number}") for number, data in enumerate(files)]

        return await self._work(LONG_WORK + 1, read)

    async def _start(
        self,
        request: Request,
        model: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        images: Sequence[Sequence[PromptImage]] = (),
    ) -> Generation:
        """model: its name. images: of each prompt; none of any if empty."""
        if model in self.engine.adapters:
            sampling = dataclasses.replace(sampling, adapter=model)
        with refusing_values():
            state = request.state
            state.generation = await self.replicas.generate(prompts, sampling, state.deadline, state.client, images)
        return state.generation

    async def _encode(self, text: str, field: str) -> list[int]:
        self._check_characters(len(text), field)
        return await self._work(len(text), self.engine.prompts.encode, text)

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    async def _render(
        self, size: int, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Tokens of a conversation."""
        if self.template is None:
            raise Refused(
                400,
                f"the model {self.config.model_name} has no chat template: use /v1/completions, or start the server "
                "with --chat_template=FILE",
            )
        self._check_characters(sum(len(protocol.text_of(message)) for message in messages), "messages")
        render = functools.partial(self.template.render, tools=tools, add_generation_prompt=add_generation_prompt)
        text = await self._work(size, render, messages)
        self._check_characters(len(text), "messages")
        return await self._work(len(text), self.tokenizer.encode_template, text)

    # ------------------------------------------------------------------ tokens

    async def tokenize(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.TokenizeRequest, content)
        self._checked_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give prompt or messages", "prompt")
        if body.prompt is None:
            tokens = await self._render(len(content), body.messages or [], body.tools, body.add_generation_prompt)
        elif body.prompt in self._named_tokens:  # how clients ask for the ids of the beginning and the end
            tokens = [self._named_tokens[body.prompt]]
        else:
            is_start = body.add_special_tokens and body.prompt
            encode = self.engine.prompts.encode if is_start else self.tokenizer.encode
            tokens = await self._work(len(body.prompt), encode, body.prompt)
        return JSONResponse({"count": len(tokens), "max_model_len": self._max_length, "tokens": tokens})

    async def detokenize(self, request: Request, content: bytes) -> Response:
        body = await self._parse(protocol.DetokenizeRequest, content)
        self._checked_model(body.model)
        vocab_size = self.tokenizer.vocab_size
        if max(body.tokens, default=0) >= vocab_size:
            raise Refused(400, f"tokens={max(body.tokens)} must be below the vocabulary size {vocab_size}", "tokens")
        text = await self._work(len(content), self.tokenizer.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """The names of special tokens, by what they are for, as in tokenizer_config.json."""
        tokenizer = self.tokenizer
        end = next((name for name, token in self._named_tokens.items() if token == tokenizer.eod_id), None)
        file = getattr(tokenizer, "path", None)
        return JSONResponse({"eos_token": end} | (configured_tokens(file) if file else {}))

    # ------------------------------------------------------------------ the server itself

    def _card(self, name: str) -> dict[str, Any]:
        more: dict[str, Any] = {"has_chat_template": self.template is not None, "sampling": dict(self.config.sampling)}
        if name in self.engine.adapters:
            more["parent"] = self.config.model_name
        return super()._card(name) | more

    async def embeddings(self, request: Request) -> Response:
        raise Refused(
            404, "this server generates text; start one that embeds: infer.py serve --run=DIR --embeddings --port=PORT"
        )

    async def health(self, request: Request) -> Response:
        self.replicas.check_ready()
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def load(self, request: Request) -> Response:
        """Replaces the parameters between two steps; requests that run continue with the new ones."""
        body = parse(protocol.LoadRequest, await self._body(request))
        if not self.config.allow_load:
            raise Refused(403, "the server was started without --allow_load")
        async with self._loading:
            self.replicas.check_ready()
            source = await _in_thread(open_source, body.run or self.config.run, body.step)
            with refusing_values():
                await self.replicas.load(source)
        return JSONResponse({"loaded": str(source)})


async def page(request: Request) -> Response:
    text = importlib.resources.files("megajax.inference.server").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})


async def _in_thread(function: Callable, *arguments) -> Any:
    """What the function returns; it may take long. Raises Refused if it raises ValueError."""
    with refusing_values():
        return await asyncio.to_thread(function, *arguments)
