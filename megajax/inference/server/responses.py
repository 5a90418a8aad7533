"""/v1/responses in its plain form: one message of text, whole or as events. Nothing is stored."""

import json
import uuid
from collections.abc import AsyncIterator

from megajax.inference.server.answers import Answer, Piece
from megajax.inference.server.engine_thread import Generation


class ResponseAnswer(Answer):
    def __init__(self, generation: Generation, model: str):
        super().__init__(generation, model, False, prefix="resp", kind="response", chunk_kind="")
        self._item_id = f"msg-{uuid.uuid4().hex}"
        self._num_events = 0

    async def whole(self) -> dict:
        whole = Piece()
        async for _, piece in self._pieces():
            whole.extend(piece)
        return self._response(whole)

    async def events(self, wants_usage: bool) -> AsyncIterator[str]:
        """wants_usage: ignored, the last event always has it."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._typed("response.created", response=self._response(None))
        yield self._typed("response.output_item.added", output_index=0, item=self._message(None))
        yield self._typed("response.content_part.added", **place, part=_part(""))
        whole = Piece()
        async for _, piece in self._pieces():
            whole.extend(piece)
            if piece.text:
                yield self._typed("response.output_text.delta", **place, delta=piece.text, logprobs=[])
        yield self._typed("response.output_text.done", **place, text=whole.text, logprobs=[])
        yield self._typed("response.content_part.done", **place, part=_part(whole.text))
        yield self._typed("response.output_item.done", output_index=0, item=self._message(whole))
        yield self._typed(f"response.{_status(whole)}", response=self._response(whole))

    def _typed(self, kind: str, **fields) -> str:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"

    def _response(self, whole: Piece | None) -> dict:
        """whole: None: at the beginning."""
        status = _status(whole)
        usage = self._usage()
        details = usage["prompt_tokens_details"] | {"cache_write_tokens": 0}
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if whole is None else [self._message(whole)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            "temperature": self._generation.sampling.temperature,
            "top_p": self._generation.sampling.top_p,
            "max_output_tokens": self._generation.sampling.max_tokens,
            "usage": None if whole is None else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": details,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def _message(self, whole: Piece | None) -> dict:
        content = [] if whole is None else [_part(whole.text)]
        message = {"id": self._item_id, "type": "message", "role": "assistant"}
        return message | {"status": _status(whole), "content": content}


def _part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(whole: Piece | None) -> str:
    if whole is None:
        return "in_progress"
    return "incomplete" if whole.finish_reason == "length" else "completed"
