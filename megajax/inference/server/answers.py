"""What the server answers, in OpenAI's forms: whole, and as the chunks of a stream."""

import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.server.engine_thread import Generation, Part
from megajax.inference.server.tool_calls import CallParser
from megajax.inference.tokens.sampling import TokenLogprobs

# JSON has no infinity, which is the log-probability of a token that may not be sampled.
SMALLEST_LOGPROB = -9999.0


@dataclasses.dataclass
class Piece:
    """New text of one choice; None in `logprobs` is the first token of a prompt, which has no log-probability."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Of tools."""

    def extend(self, other: "Piece") -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.calls += other.calls
        self.finish_reason = other.finish_reason


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("0")  # a text that every tokenizer knows, also one of numbers
        self._before = tokenizer.decode(self._anchor)
        self.of = functools.lru_cache(maxsize=100_000)(self._of)

    def _of(self, token: int) -> str:
        """Text of one token inside a text: at the beginning, some tokenizers drop its space. Bytes that are no
        complete character become U+FFFD."""
        whole = self._decode([*self._anchor, token])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._decode([token])


class Answer:
    """One answer, whole or in chunks. Choices are numbered prompt by prompt."""

    def __init__(
        self, generation: Generation, model: str, has_tokens: bool, *, prefix: str, kind: str, chunk_kind: str
    ):
        """has_tokens: with the ids of the tokens (vLLM's return_token_ids)."""
        self._generation = generation
        self._has_tokens = has_tokens
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._num_generated = 0

    # Where the two kinds of answers differ:

    def _first_chunks(self) -> list[dict]:
        return []

    def _choice(self, number: int, piece: Piece) -> dict:
        raise NotImplementedError

    def _chunk_choice(self, number: int, piece: Piece) -> dict:
        raise NotImplementedError

    def _piece(self, part: Part, is_first: bool) -> Piece:
        """is_first: of its choice."""
        output = part.output
        return Piece(output.text, list(output.tokens), list(output.logprobs or []), output.finish_reason)

    async def whole(self) -> dict:
        """Raises what `Generation.parts` does."""
        choices = [Piece() for _ in range(len(self._generation.requests) * self._generation.sampling.n)]
        async for number, piece in self._pieces():
            choices[number].extend(piece)
        formed = [self._with_tokens(self._choice(number, piece), piece) for number, piece in enumerate(choices)]
        return {**self._head, "object": self._kind, "choices": formed, "usage": self._usage()}

    async def events(self, wants_usage: bool) -> AsyncIterator[str]:
        """Server-sent events. Raises what `Generation.parts` does."""
        rest = {"usage": None} if wants_usage else {}
        for choice in self._first_chunks():
            yield self._event({"choices": [choice], **rest})
        async for number, piece in self._pieces():
            choice = self._with_tokens(self._chunk_choice(number, piece), piece)
            yield self._event({"choices": [choice], **rest})
        if wants_usage:
            yield self._event({"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        seen = set()
        async for part in self._generation.parts():
            number = part.prompt * self._generation.sampling.n + part.output.index
            self._num_generated += len(part.output.tokens)
            yield number, self._piece(part, number not in seen)
            seen.add(number)

    def _with_tokens(self, choice: dict, piece: Piece) -> dict:
        return choice | {"token_ids": piece.tokens} if self._has_tokens else choice

    def _event(self, fields: dict) -> str:
        return as_event({**self._head, "object": self._chunk_kind, **fields})

    def _usage(self) -> dict:
        requests = self._generation.requests
        num_prompt = self._generation.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached for request in requests)},
        }


class CompletionAnswer(Answer):
    def __init__(
        self,
        generation: Generation,
        model: str,
        texts: TokenTexts,
        has_tokens: bool = False,
        echoed: Sequence[str] | None = None,
    ):
        """echoed: texts of the prompts, which precede the answers; None: they do not."""
        kind = "text_completion"
        super().__init__(generation, model, has_tokens, prefix="cmpl", kind=kind, chunk_kind=kind)
        self._texts = texts
        self._echoed = echoed
        self._offsets: dict[int, int] = {}  # number of a choice -> length of its text so far

    def _piece(self, part: Part, is_first: bool) -> Piece:
        piece = super()._piece(part, is_first)
        if not is_first or self._echoed is None:
            return piece
        request = part.output.request
        logprobs = [None, *request.prompt_logprobs] if request.prompt_logprobs is not None else []
        echoed = Piece(self._echoed[part.prompt], list(request.prompt), logprobs)
        echoed.extend(piece)
        return echoed

    def _choice(self, number: int, piece: Piece) -> dict:
        logprobs = None
        if self._generation.sampling.logprobs is not None:
            logprobs = self._logprobs(number, piece)
        return {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    _chunk_choice = _choice

    def _logprobs(self, number: int, piece: Piece) -> dict:
        count = self._generation.sampling.logprobs
        names = [self._texts.of(entry.token) if entry else self._texts.of(piece.tokens[0]) for entry in piece.logprobs]
        offsets = []
        offset = self._offsets.get(number, 0)
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[number] = offset
        return {
            "tokens": names,
            "token_logprobs": [entry and finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [entry and self._top(entry, count) for entry in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs, count: int | None) -> dict[str, float]:
        """The most likely tokens and the chosen one. Of tokens with the same text, the most likely one counts."""
        found = {}
        for token, logprob in [*entry.top[:count], (entry.token, entry.logprob)]:
            found.setdefault(self._texts.of(token), finite(logprob))
        return found


class ChatAnswer(Answer):
    def __init__(
        self,
        generation: Generation,
        model: str,
        texts: TokenTexts,
        has_tokens: bool = False,
        marker: str | None = None,
        most_calls: int | None = None,
    ):
        """marker: of the calls of tools in the text; None: there are none. most_calls: further ones are left out."""
        kind = "chat.completion"
        super().__init__(generation, model, has_tokens, prefix="chatcmpl", kind=kind, chunk_kind=f"{kind}.chunk")
        self._texts = texts
        self._marker = marker
        self._most_calls = most_calls
        self._parsers: dict[int, CallParser] = {}  # number of a choice -> its parser

    def _piece(self, part: Part, is_first: bool) -> Piece:
        piece = super()._piece(part, is_first)
        if self._marker is None:
            return piece
        parser = self._parsers.setdefault(part.output.index, CallParser(self._marker))
        first = parser.num_calls
        piece.text, calls = parser.add(piece.text, piece.finish_reason is not None)
        numbered = [{"index": index, **call} for index, call in enumerate(calls, first)]
        piece.calls = numbered if self._most_calls is None else numbered[: max(self._most_calls - first, 0)]
        if parser.num_calls and piece.finish_reason == "stop":
            piece.finish_reason = "tool_calls"
        return piece

    def _first_chunks(self) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [{"index": number, **rest} for number in range(self._generation.sampling.n)]

    def _choice(self, number: int, piece: Piece) -> dict:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text if piece.text.strip() else None
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in piece.calls]
        return {"index": number, "message": message, **self._rest(piece)}

    def _chunk_choice(self, number: int, piece: Piece) -> dict:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = piece.calls
        return {"index": number, "delta": delta, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict:
        logprobs = None
        if self._generation.sampling.logprobs is not None:
            count = self._generation.sampling.logprobs
            content = [
                self._entry(entry.token, entry.logprob)
                | {"top_logprobs": [self._entry(*each) for each in entry.top[:count]]}
                for entry in piece.logprobs
                if entry is not None
            ]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _entry(self, token: int, logprob: float) -> dict:
        text = self._texts.of(token)
        # part of a character has no text
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


# json.dumps would make an encoder for each event.
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def as_event(fields: dict) -> str:
    return f"data: {_to_json(fields)}\n\n"


def finite(logprob: float) -> float:
    return max(float(logprob), SMALLEST_LOGPROB)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    if kind is None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
