"""Conversations about images and sound, in the forms that people keep them, as messages with parts of type image and
audio. What the table says of images holds for clips of sound with `audio` in the place of `image`.

| record | images |
|---|---|
| `messages`: [{"role", "content"}], OpenAI | parts {"type": "image", "image": PATH} or {"type": "image_url", ...} |
| the same with the field `images`: [PATH] | parts {"type": "image"}, or `<image>` in the text, in this order |
| `conversations`: [{"from", "value"}], LLaVA; `image`: PATH or [PATH] | `<image>` in the text, in this order |
| `instruction`, `input`, `output`; `prompt`, `completion`, with `image` | the same |
| `question` or `context`, and `answer` or `answers` | those of the record, before the question |
| `caption` | those of the record, before the caption, which is the answer |

Of several `answers` the one that is given most often is taken, and the first of those.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megajax.audio import wav
from megajax.data.indexed.images import ImagePlace
from megajax.data.prepare.conversation_records import form_of
from megajax.images import decode
from megajax.media.kinds import AUDIO, IMAGE, Kind

CHECKS = {IMAGE: decode.check, AUDIO: wav.check}


class MediaSource(NamedTuple):
    """The bytes of a medium: of a whole file without a size, else of a part of it."""

    path: str
    offset: int = 0
    num_bytes: int | None = None


class Conversation(NamedTuple):
    messages: list[dict]
    """For a ChatTemplate: contents are texts, or lists of parts such as {"type": "image"} and {"type": "text", "text"}.
    """
    media: list[tuple[Kind, str | None]]
    """Kind and path of each part that is no text, in order; None if they come with the record."""


def conversation(
    record: Any, kinds: Sequence[Kind] = (IMAGE,), num_listed: Mapping[Kind, int] | None = None
) -> Conversation:
    """kinds: that it may have; placeholders of others are text. num_listed: number of media that the record comes with,
    in a tar; None: it names their paths.

    Raises ValueError if the record has none of the forms above, if it does not have as many placeholders as media, or
    one of them in an answer.
    """
    if not isinstance(record, dict):
        raise ValueError("not an object with a conversation")
    listed = {kind: _paths(record, kind) for kind in kinds} if num_listed is None else {}
    counts = num_listed or {kind: len(paths) for kind, paths in listed.items()}
    by_name = {kind.name: kind for kind in kinds}
    messages = _messages(record, counts)
    in_parts = [message for message in messages if isinstance(message["content"], list)]
    parts = [(message, part) for message in in_parts for part in message["content"] if part["type"] != "text"]
    media = [(by_name[part["type"]], part.pop("path")) for _, part in parts]
    if num_listed is not None:  # whatever the parts call them
        media = [(kind, None if num_listed[kind] else path) for kind, path in media]
    for kind in kinds:
        own = [path for found, path in media if found == kind and path is not None]
        if listed.get(kind) and own:
            raise ValueError(
                f"its {kind.plural} are named twice, in a field of their own and in the messages; leave one out"
            )
        placeholders = sum(found == kind for found, _ in media)
        if placeholders != (count := counts[kind] or len(own)):
            raise ValueError(
                f"the text has {placeholders} placeholders of {kind.plural}, but there are {count} {kind.plural}"
            )
    for message, part in parts:
        if message["role"] == "assistant":
            noun = by_name[part["type"]].noun
            article = "an" if noun[0] in "aeiou" else "a"
            raise ValueError(f"an answer has {article} {noun}, but only text is learnt; take it out")
    following = {kind: iter(paths) for kind, paths in listed.items()}
    return Conversation(messages, [(kind, path or next(following.get(kind, iter(())), None)) for kind, path in media])


def _paths(record: dict, kind: Kind) -> list[str]:
    """Of the field `images` or `image`, `audios` or `audio`; [] without."""
    names = (f"{kind.name}s", kind.name)
    found = next((record[key] for key in names if record.get(key) is not None), [])
    paths = [found] if isinstance(found, str) else found
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"the field '{names[0]}' or '{names[1]}' must be a path or a list of paths")
    return paths


def _messages(record: dict, counts: Mapping[Kind, int]) -> list[dict]:
    """Messages whose contents are text, or parts such as {"type": "image", "path"} and {"type": "text", "text"}."""
    kinds = tuple(counts)
    if record.get("messages") is not None:
        has_placeholders = any(counts.values())
        return [_openai(message, kinds, has_placeholders) for message in _objects(record, "messages")]
    if form := form_of(record):
        return [_openai(message, kinds, True) for message in form.messages(record)]
    answer = _first(record, "answers", "answer")
    question = _first(record, "question", "context")
    if question is None and answer is None:
        question = ""
        answer = record.get("caption")
    if isinstance(answer, list) and answer:
        answer = max(answer, key=answer.count)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError(
            "no conversation: it needs messages, conversations, a question with an answer, or a caption, and has the "
            f"fields {', '.join(map(repr, list(record)[:20]))}"
        )
    has_placeholders = _placeholders(kinds).search(question) is not None
    placeholders = "" if has_placeholders else "".join(f"<{kind.name}>" * count for kind, count in counts.items())
    content = _split(placeholders + question, kinds)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _first(record: dict, *keys: str) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _objects(record: dict, key: str) -> list[dict]:
    found = record[key]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise ValueError(f"the field {key!r} is no list of messages")
    return found


def _placeholders(kinds: Sequence[Kind]) -> re.Pattern[str]:
    # LLaVA's data has the image on a line of its own: the newline belongs to it.
    return re.compile(f"<({'|'.join(kind.name for kind in kinds)})>\\n?")


def _split(text: str, kinds: Sequence[Kind]) -> list[dict]:
    """Parts of a text in which media are placeholders."""
    parts: list[dict] = []
    for number, piece in enumerate(_placeholders(kinds).split(text)):
        if number % 2:
            parts.append({"type": piece, "path": None})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def _openai(message: dict, kinds: Sequence[Kind], has_placeholders: bool) -> dict:
    if not isinstance(message.get("role"), str):
        raise ValueError("the field 'messages' has a message without a role")
    content = message.get("content")
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, list):
        return message | {"content": [_part(part, kinds) for part in content]}
    if isinstance(content, str) and has_placeholders:
        return message | {"content": _split(content, kinds)}
    return message | {"content": content}


def _part(part: Any, kinds: Sequence[Kind]) -> dict:
    name = part.get("type") if isinstance(part, dict) else None
    if name == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = next((kind for kind in kinds if name in (kind.name, f"{kind.name}_url")), None)
    if kind is None:
        known = ", ".join(f"{kind.name} and {kind.name}_url" for kind in kinds)
        raise ValueError(f"a part of a message has the type {name!r}; text, {known} are read")
    path = _first(part, kind.name, f"{kind.name}_url", "path", "url")
    path = path.get("url") if isinstance(path, dict) else path
    if path is not None and not isinstance(path, str):
        raise ValueError(f"a part of a message is of type {name} without a path")
    return {"type": kind.name, "path": path}


def find_file(folder: str, path: str, kind: Kind = IMAGE) -> str:
    """The file that a record names, in `folder` or below. Raises ValueError for any other place."""
    if path.startswith("data:"):
        raise ValueError(
            f"the {kind.noun} stands in the record itself (a data URI); put it in a file, and name its path"
        )
    path = path.removeprefix("file://")
    path.encode()  # JSON can spell half of a surrogate pair, which no file name has
    if "://" in path:
        raise ValueError(f"the {kind.noun} {path} is not in a file, and nothing is fetched; download it first")
    root = os.path.abspath(folder)
    found = os.path.normpath(os.path.join(root, path))
    if os.path.commonpath([root, found]) != root:
        raise ValueError(
            f"the {kind.noun} {path} is not in {folder}; name the folder of all {kind.plural} with --images"
        )
    return found


def place_of(source: MediaSource, max_bytes: int, kind: Kind = IMAGE) -> ImagePlace:
    """Reads the medium. Raises ValueError, naming the file, if it is missing, damaged or too large."""
    path, offset, num_bytes = source
    if not os.path.isfile(path):
        raise ValueError(f"the {kind.noun} {path} does not exist")
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        num_bytes = file_bytes if num_bytes is None else num_bytes
        if num_bytes > max_bytes:
            raise ValueError(f"the {kind.noun} {path} has {num_bytes:,} bytes; allow it with --max_document_bytes")
        file.seek(offset)
        data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise ValueError(f"{path} ends within the {kind.noun} at byte {offset}; copy it again")
    name = path if num_bytes == file_bytes else f"{path} at byte {offset}"
    size = CHECKS[kind](data, name)
    return ImagePlace(os.path.abspath(path), offset, num_bytes, file_bytes, *size)
