"""Conversations about images, in the forms that people keep them, as messages with parts of type image.

| record | images |
|---|---|
| `messages`: [{"role", "content"}], OpenAI | parts {"type": "image", "image": PATH} or {"type": "image_url", ...} |
| the same with the field `images`: [PATH] | parts {"type": "image"}, or `<image>` in the text, in this order |
| `conversations`: [{"from", "value"}], LLaVA; `image`: PATH or [PATH] | `<image>` in the text, in this order |
| `question` or `context`, and `answer` or `answers` | those of the record, before the question |
| `caption` | those of the record, before the caption, which is the answer |

Of several `answers` the one that is given most often is taken, and the first of those.
"""

import os
import re
from typing import Any, NamedTuple

from megajax.data.indexed.images import ImagePlace
from megajax.images.decode import check

# LLaVA's data has the image on a line of its own: the newline belongs to it.
PLACEHOLDER = re.compile(r"<image>\n?")
ROLES = {"human": "user", "gpt": "assistant"}  # LLaVA's names, and ours


class ImageSource(NamedTuple):
    """The bytes of an image: of a whole file without a size, else of a part of it."""

    path: str
    offset: int = 0
    num_bytes: int | None = None


class Conversation(NamedTuple):
    messages: list[dict]
    """For a ChatTemplate: contents are texts, or lists of the parts {"type": "image"} and {"type": "text", "text"}."""
    paths: list[str]
    """Of the images, one for each part of type image; none if they come with the record."""


def conversation(record: Any, num_listed: int = 0) -> Conversation:
    """num_listed: number of images that the record comes with, in a tar; 0: it names their paths.

    Raises ValueError if the record has none of the forms above, if it does not have as many placeholders as images, or
    one of them in an answer.
    """
    if not isinstance(record, dict):
        raise ValueError("not an object with a conversation")
    listed = [] if num_listed else _paths(record)
    messages = _messages(record, num_listed or len(listed))
    in_parts = [message for message in messages if isinstance(message["content"], list)]
    images = [(message, part) for message in in_parts for part in message["content"] if part["type"] == "image"]
    own = [path for _, part in images if (path := part.pop("path")) is not None]
    if listed and own:
        raise ValueError("its images are named twice, in a field of their own and in the messages; leave one out")
    paths = [] if num_listed else listed or own
    if len(images) != (count := num_listed or len(paths)):
        raise ValueError(f"the text has {len(images)} placeholders of images, but there are {count} images")
    if any(message["role"] == "assistant" for message, _ in images):
        raise ValueError("an answer has an image, but only text is learnt; take it out")
    return Conversation(messages, paths)


def _paths(record: dict) -> list[str]:
    """Of the field `images` or `image`; [] without."""
    found = next((record[key] for key in ("images", "image") if record.get(key) is not None), [])
    paths = [found] if isinstance(found, str) else found
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError("the field 'images' or 'image' must be a path or a list of paths")
    return paths


def _messages(record: dict, num_images: int) -> list[dict]:
    """Messages whose contents are text, or parts {"type": "image", "path"} and {"type": "text", "text"}."""
    if record.get("messages") is not None:
        return [_openai(message, num_images > 0) for message in _objects(record, "messages")]
    if record.get("conversations") is not None:
        return [_llava(turn) for turn in _objects(record, "conversations")]
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
    placeholders = "" if PLACEHOLDER.search(question) else "<image>" * num_images
    content = _split(placeholders + question)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _first(record: dict, *keys: str) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _objects(record: dict, key: str) -> list[dict]:
    found = record[key]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise ValueError(f"the field {key!r} is no list of messages")
    return found


def _split(text: str) -> list[dict]:
    """Parts of a text in which images are placeholders."""
    parts: list[dict] = []
    for number, piece in enumerate(PLACEHOLDER.split(text)):
        parts += [{"type": "image", "path": None}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts or [{"type": "text", "text": ""}]


def _llava(turn: dict) -> dict:
    role = turn.get("from")
    text = turn.get("value")
    if not isinstance(role, str) or not isinstance(text, str):
        raise ValueError('the field \'conversations\' is no list of {"from", "value"} with texts')
    return {"role": ROLES.get(role, role), "content": _split(text)}


def _openai(message: dict, has_placeholders: bool) -> dict:
    if not isinstance(message.get("role"), str):
        raise ValueError("the field 'messages' has a message without a role")
    content = message.get("content")
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, list):
        return message | {"content": [_part(part) for part in content]}
    if isinstance(content, str) and has_placeholders:
        return message | {"content": _split(content)}
    return message | {"content": content}


def _part(part: Any) -> dict:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"a part of a message has the type {kind!r}; text, image and image_url are read")
    path = _first(part, "image", "image_url", "path", "url")
    path = path.get("url") if isinstance(path, dict) else path
    if path is not None and not isinstance(path, str):
        raise ValueError("a part of a message is an image without a path")
    return {"type": "image", "path": path}


def find_file(folder: str, path: str) -> str:
    """The file that a record names, in `folder` or below. Raises ValueError for any other place."""
    if path.startswith("data:"):
        raise ValueError("an image stands in the record itself (a data URI); put it in a file, and name its path")
    path = path.removeprefix("file://")
    path.encode()  # JSON can spell half of a surrogate pair, which no file name has
    if "://" in path:
        raise ValueError(f"the image {path} is not in a file, and nothing is fetched; download it first")
    root = os.path.abspath(folder)
    found = os.path.normpath(os.path.join(root, path))
    if os.path.commonpath([root, found]) != root:
        raise ValueError(f"the image {path} is not in {folder}; name the folder of all images with --images")
    return found


def place_of(source: ImageSource, max_bytes: int) -> ImagePlace:
    """Reads the image. Raises ValueError, naming the file, if it is missing, damaged or too large."""
    path, offset, num_bytes = source
    if not os.path.isfile(path):
        raise ValueError(f"the image {path} does not exist")
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        num_bytes = file_bytes if num_bytes is None else num_bytes
        if num_bytes > max_bytes:
            raise ValueError(f"the image {path} has {num_bytes:,} bytes; allow it with --max_document_bytes")
        file.seek(offset)
        data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise ValueError(f"{path} ends within the image at byte {offset}; copy it again")
    name = path if num_bytes == file_bytes else f"{path} at byte {offset}"
    height, width = check(data, name)
    return ImagePlace(os.path.abspath(path), offset, num_bytes, file_bytes, height, width)
