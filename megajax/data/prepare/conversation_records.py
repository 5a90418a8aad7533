"""Conversations in the forms in which people keep them, as messages with roles.

A form is recognised by the fields of a record, in the order of FORMS. Fields that are null, as columns of a table have
them, count as missing; other fields, such as an id, are ignored.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# ShareGPT's names of roles, and ours. https://github.com/lm-sys/FastChat/blob/main/docs/training.md
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# A dataset with these has images or sound, of which nothing would be left in the text.
MEDIA_FIELDS = ("image", "images", "audio", "audios")
MOST_NAMES = 20  # of fields or columns in a message


class Form(NamedTuple):
    name: str
    fields: str
    """What a record has, for messages."""
    needed: tuple[tuple[str, ...], ...]
    """One name of each must be a field of the record."""
    messages: Callable[[dict], list[dict]]
    """Raises ValueError for fields of other types."""

    def fits(self, record: dict) -> bool:
        return all(_first(record, names) is not None for names in self.needed)


def form_of(record: dict) -> Form | None:
    """The form of a record, None if its fields are those of none."""
    return next((form for form in FORMS if form.fits(record)), None)


def recognised(record: Any, expected: str | None = None) -> Form:
    """The form of a record. expected: the name of that of its file; None: any. Raises ValueError with the fields that
    the record has and the forms that are known."""
    form = form_of(record) if isinstance(record, dict) else None
    if form is not None and expected in (None, form.name):
        return form
    found = shortened([name for name, value in record.items() if value is not None]) if isinstance(record, dict) else ""
    problem = "no conversation"
    if form is not None:
        problem = f"a conversation in the form {form.name}, in a file that began with {expected}; write a file for each"
    raise ValueError(f"{problem}: it has the fields {found or 'of no object'}; known forms are {_known()}")


def _known() -> str:
    return "; ".join(f"{form.name} ({form.fields})" for form in FORMS)


def shortened(names: Sequence[str]) -> str:
    """For a message: the first names of many."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(repr, names[:MOST_NAMES])) + more


def messages_of(record: dict, key: str = "messages") -> list[dict]:
    """A list of messages in the field `key`."""
    messages = record[key]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise ValueError(f"the field {key!r} is no list of messages with roles")
    # a column has every field in every row, and null where a message has none
    return [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]


def _of_sharegpt(record: dict) -> list[dict]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("the field 'conversations' is no list of messages")
    if turns and all("role" in turn for turn in turns):  # as some datasets have it
        return _system(record) + messages_of(record, "conversations")
    messages = _system(record)
    for turn in turns:
        speaker = turn.get("from")
        if not isinstance(speaker, str) or not isinstance(turn.get("value"), str):
            raise ValueError('the field \'conversations\' is no list of {"from", "value"} with texts')
        if speaker not in ROLES:
            raise ValueError(f"'from': {speaker!r} is no known speaker; use one of {', '.join(ROLES)}")
        messages.append({"role": ROLES[speaker], "content": turn["value"]})
    return messages


def _of_alpaca(record: dict) -> list[dict]:
    question = _text(record, "instruction")
    context = _text(record, "input", "context")
    answer = _text(record, "output", "response")
    earlier = record.get("history") or []
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise ValueError("the field 'history' is no list of pairs of question and answer")
    pairs = [*earlier, (f"{question}\n{context}" if context else question, answer)]
    return _system(record) + [message for asked, answered in pairs for message in _pair(asked, answered)]


def _of_prompt(record: dict) -> list[dict]:
    """Both are texts, or as in TRL both are lists of messages."""
    answer_name = "completion" if record.get("completion") is not None else "response"
    if isinstance(record["prompt"], list):
        return _system(record) + messages_of(record, "prompt") + messages_of(record, answer_name)
    return _system(record) + _pair(_text(record, "prompt"), _text(record, answer_name))


def _pair(question: Any, answer: Any) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(record: dict) -> list[dict]:
    text = _text(record, "system")
    return [{"role": "system", "content": text}] if text else []


def _text(record: dict, *names: str) -> str:
    """Of the first of these fields that there is, "" without."""
    name = _first(record, names)
    if name is None:
        return ""
    if not isinstance(record[name], str):
        raise ValueError(f"the field {name!r} is no text")
    return record[name]


def _first(record: dict, names: Sequence[str]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


FORMS = (
    Form("messages", "messages: role, content", (("messages",),), messages_of),
    Form("ShareGPT", "conversations: from, value", (("conversations",),), _of_sharegpt),
    Form("Alpaca", "instruction, input, output or response", (("instruction",), ("output", "response")), _of_alpaca),
    Form("prompt/completion", "prompt, completion or response", (("prompt",), ("completion", "response")), _of_prompt),
)
FIELDS = (
    "messages", "conversations", "instruction", "input", "context", "output", "prompt", "completion", "response",
    "history", "system", "tools",
)  # fmt: skip
"""All that a record of one of the forms may have."""
