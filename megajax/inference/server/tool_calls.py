"""Calls of tools in what a model writes, in the form in which its chat template writes them.

Hermes (also Qwen) writes <tool_call>{"name": ..., "arguments": {...}}</tool_call>, Mistral [TOOL_CALLS] [{"name": ...,
"arguments": {...}}], and Llama 3 nothing but {"name": ..., "parameters": {...}}, sometimes after <|python_tag|>.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.data.tokenizers.tokenizer import Tokenizer

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
ANY_MARK = "|".join(map(re.escape, MARKS))
# Between two calls, and around them. A mark goes first: one begins like a list.
SEPARATORS = re.compile(rf"(?:{ANY_MARK}|[\s\[\],;])*")
# Rendered to see how the template writes a call. Mistral's wants ids of 9 characters.
PROBE = (
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}
        ],
    },
)
WRITTEN = re.compile(
    r'(?:(?P<marker><tool_call>|\[TOOL_CALLS\])(?P<space>\s*\[?))?\{"name": "NAME", "(?P<key>arguments|parameters)": '
    r'\{"KEY": "VALUE"\}[^{}]*\}(?P<after>\s*</tool_call>|\]|)'
)
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
# Of llguidance: spaces as json.dumps writes them.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    marker: str
    """Text before the first call; "": calls are the whole text."""
    before: str
    """Between the marker and a call."""
    key: str
    """Name of the arguments."""
    after: str
    """Text after the last call."""

    def grammar(self, functions: Sequence[Mapping[str, Any]], token_id: Callable[[str], int | None]) -> str:
        """A Lark grammar, in llguidance's dialect, of a call of one of the functions, as OpenAI describes them.
        token_id: of the tokenizer; marks that are tokens are written as such."""

        def literal(text: str) -> str:
            pieces = [(piece, token_id(piece) if piece in MARKS else None) for piece in re.split(f"({ANY_MARK})", text)]
            terms = [_json(piece) if token is None else f"<[{token}]>" for piece, token in pieces if piece]
            return " ".join(terms)

        rules = []
        for number, function in enumerate(functions):
            head = _json(f'{{"name": {_json(function["name"])}, "{self.key}": ')
            schema = {**(function.get("parameters") or NO_PARAMETERS), "type": "object", "x-guidance": SPACES}
            rules.append(f'call_{number}: {head} %json {_json(schema)} "}}"')
        names = " | ".join(f"call_{number}" for number in range(len(functions)))
        start = f"start: {literal(self.marker + self.before)} call {literal(self.after)}"
        return "\n".join([start, f"call: {names}", *rules]) + "\n"


def find_tool_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """How the template writes a call of a tool; None: not at all, in a form that is not known, or with a marker that
    the tokenizer does not decode."""
    try:
        prompt = template.render(PROBE[:1], add_generation_prompt=True)
        whole = template.render(PROBE)
    except ValueError:  # from a template that knows no tools
        return None
    found = WRITTEN.search(whole)
    if found is None:
        return None
    marker = found["marker"] or ""
    # without a marker, a call must be the whole text
    is_alone = whole.startswith(prompt) and found.start() == len(prompt)
    is_readable = marker in tokenizer.decode(tokenizer.encode_template(marker)) if marker else is_alone
    return ToolFormat(marker, found["space"] or "", found["key"], found["after"]) if is_readable else None


class CallParser:
    """Separates calls from text that arrives in pieces."""

    def __init__(self, marker: str):
        """marker: of the ToolFormat."""
        self.num_calls = 0
        self._marker = marker
        self._held = ""  # not decided yet
        self._expects_call = not marker
        self._follows_call = False  # there was a call since the marker
        self._object = _ObjectEnd()

    def add(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """-> (text that belongs to no call, calls that are complete). What looks like a call but is none is text."""
        self._held += text
        content = ""
        calls: list[dict[str, Any]] = []
        while True:
            if not self._expects_call:
                place = self._held.find(self._marker) if self._marker else -1
                if place < 0:
                    keep = 0 if is_last else _overlap(self._held, self._marker)
                    return content + self._take(len(self._held) - keep), calls
                content += self._take(place)
                self._expects_call = True
                self._follows_call = False
            separators = SEPARATORS.match(self._held)
            assert separators is not None  # it matches nothing, too
            begin = separators.end()
            end = begin
            if self._held.startswith("{", begin):
                end = self._object.find(self._held, begin)
                if end is None and not is_last:
                    return content, calls
                if call := _call(self._held[begin:end]):
                    calls.append(call)
                    self.num_calls += 1
                    self._follows_call = True
                    self._take(end)
                    continue
            elif not is_last and (begin == len(self._held) or any(_overlap(self._held, mark) for mark in MARKS)):
                return content, calls
            if self._follows_call:
                self._take(begin)
                end = None if end is None else end - begin
            content += self._take(end)
            self._expects_call = False

    def _take(self, count: int | None) -> str:
        """The first characters of what is held; None: all."""
        taken = self._held[:count]
        self._held = self._held[len(taken) :]
        self._object = _ObjectEnd()
        return taken


class _ObjectEnd:
    """Finds the end of a JSON object in a text that grows, and reads each character once."""

    _STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)

    def __init__(self):
        self._place = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str, begin: int) -> int | None:
        for match in self._STRUCTURE.finditer(text, max(self._place, begin)):
            self._place = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and match[0] in "{}[]":
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return self._place
        self._place = max(self._place, len(text) - text.endswith("\\"))
        return None


def _call(text: str) -> dict[str, Any] | None:
    """In OpenAI's form; None if the text is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(found.get("name"), str) or not isinstance(arguments, dict):
        return None
    function = {"name": found["name"], "arguments": _json(arguments)}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of the text with which the mark may begin."""
    return next((count for count in range(len(mark) - 1, 0, -1) if text.endswith(mark[:count])), 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
