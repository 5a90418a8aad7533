"""Renders conversations with a chat template, and finds the answers in the text."""

import bisect
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megajax.data.tokenizers.tokenizer import Tokenizer, beside, configured_tokens, read_json

if TYPE_CHECKING:
    from megajax.data.tokenizers.provenance import Text

# The template of a tokenizer without one. https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# JSON files that have the field chat_template, if there is no chat_template.jinja; the first one is that of processors
# of images, whose tokenizer may have a template of text.
TEMPLATE_FILES = "chat_template.json", "tokenizer_config.json"
# Chosen by programs, not by users; some templates turn them into special tokens.
ROLES = "system", "developer", "user", "assistant", "tool"
# How templates mark turns, also for tokenizers that have no special tokens.
MARKER = re.compile(r"(?=(<[|\uff5c][^<>\s]{1,64}[|\uff5c]>))")


class ChatTemplate:
    """Renders conversations with a jinja2 template, called as by Hugging Face (names, settings, raise_exception).

    The template runs in a sandbox without a clock: the same messages always give the same text. variables: available to
    it besides messages, tools and add_generation_prompt, such as bos_token.

    All `special_tokens` in the text must be written by the template alone (megajax/data/tokenizers/provenance.py), from
    its own text, the variables and ROLES, so that text of a user cannot become a token that controls the model. If the
    template writes `<|name|>` and that is not a special token, no text of this form may come from a message; for plain
    text in other forms, such as `User:`, the author cannot be determined. Pickles as its arguments. Raises ValueError
    if the template cannot be compiled. Time and memory of a rendering are limited (megajax/data/tokenizers/sandbox.py).

    media_tokens: of kinds of media by their names; written once (image_text says how) for each part such as {"type":
    "image"} or {"type": "audio"} of a message whose content is a list of parts. A template that writes these tokens
    itself, as those of vision-language models do, gets all contents as lists. Any other gets them as text, in which a
    medium is its token, and a newline if something follows. None or empty: contents are passed on.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        special_tokens: Iterable[str],
        media_tokens: Mapping[str, str] | None = None,
    ):
        try:
            import jinja2

            from megajax.data.tokenizers.provenance import Environment, Generation
        except ImportError:
            raise ValueError("chat templates need the package jinja2; pip install 'megajax[data]'") from None
        self.source = source
        self.variables = dict(variables)
        self.media_tokens = dict(media_tokens or {})
        self._marks = {name: image_text(token) for name, token in self.media_tokens.items()}
        of_media = [*self.media_tokens.values(), *(marker for marker, _ in self._marks.values())]
        self.special_tokens = tuple(dict.fromkeys([*special_tokens, *of_media]))
        text = json.dumps([source, self.variables], sort_keys=True)
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        extensions = ["jinja2.ext.loopcontrols", Generation]
        environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

        def raise_exception(message: str):
            raise jinja2.TemplateError(message)

        try:
            self._template = environment.from_string(source, globals={"raise_exception": raise_exception})
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {' '.join(str(error).split())}") from None
        self._takes_parts = True
        self._takes_parts = bool(self._marks) and self._writes_marks()

    def __reduce__(self):
        return type(self), (self.source, self.variables, self.special_tokens, self.media_tokens)

    def render(self, messages: Sequence[Mapping], *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """add_generation_prompt: end with the text before an answer. Raises ValueError if the template or a message
        cannot be used."""
        text = self._render(messages, tools, add_generation_prompt)
        if name := self._forged(text):
            raise ValueError(self._describe_forged(name, messages, tools, add_generation_prompt))
        return self._finished(text)

    def _finished(self, text: str) -> str:
        """With what stands for a medium in the place of its marker."""
        text = str.__str__(text)
        for marker, written in self._marks.values():
            text = text.replace(marker, written)
        return text

    def _render(self, messages: Sequence[Mapping], tools: Any, add_generation_prompt: bool) -> "Text":
        from megajax.data.tokenizers.provenance import Text, literal
        from megajax.data.tokenizers.sandbox import TooMuch, limited

        messages = [self._with_parts(message) for message in messages] if self._marks else messages
        messages = [
            {**message, "role": literal(message["role"])} if message.get("role") in ROLES else message
            for message in messages
        ]
        variables = {name: literal(value) for name, value in self.variables.items()}
        try:
            with limited():
                text = self._template.render(
                    messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
                )
        except TooMuch as error:
            raise ValueError(f"chat template: {error}") from None
        except Exception as error:  # a template can fail as any program can
            raise ValueError(f"chat template: {type(error).__name__}: {error}") from None
        assert isinstance(text, Text)  # what the environment makes, although jinja2 says str
        return text

    def _with_parts(self, message: Mapping) -> Mapping:
        """The message with the content that this template takes."""
        from megajax.data.tokenizers.provenance import join, literal

        content = message.get("content")
        if self._takes_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if self._takes_parts or not isinstance(content, list):
            return message
        pieces = []
        for number, part in enumerate(content, 1):
            mark = self._marks.get(part["type"])
            pieces.append(part["text"] if mark is None else literal(mark[0]))
            pieces.append("\n" if mark is not None and number < len(content) else "")
        return {**message, "content": join(pieces)}

    def _writes_marks(self) -> bool:
        """Whether the template writes the marker of each kind for such a part of a message."""
        content = [*({"type": name} for name in self._marks), {"type": "text", "text": "?"}]
        try:
            text = self._render([{"role": "user", "content": content}], None, False)
            return all(text.count(marker) == 1 for marker, _ in self._marks.values())
        except ValueError:  # from a template that expects text
            return False

    def _forged(self, text: "Text") -> str | None:
        """A special token, or a marker, that is not entirely written by the template; None if there is none."""
        found = [(match.start(), match[1]) for match in MARKER.finditer(text)]
        if all(name in self.special_tokens for begin, name in found if text.is_written(begin, name)):
            found = []  # all markers of the template are special tokens; others are text
        for name in self.special_tokens:
            begin = text.find(name)
            while begin >= 0:
                found.append((begin, name))
                begin = text.find(name, begin + 1)
        return next((name for begin, name in found if not text.is_written(begin, name)), None)

    def _describe_forged(self, name: str, messages: Sequence[Mapping], tools: Any, add_generation_prompt: bool) -> str:
        """An error message naming a field that causes it, if the first messages with that field do."""

        def forged(some: Sequence[Mapping]) -> str | None:
            try:
                return self._forged(self._render(some, tools, add_generation_prompt))
            except ValueError:  # from a template that needs what is missing
                return None

        number = bisect.bisect_left(range(len(messages) - 1), True, key=lambda n: bool(forged(messages[: n + 1])))
        earlier = messages[:number]
        name = forged([*earlier, *messages[number : number + 1]]) or name
        for key, value in messages[number].items() if messages else ():
            is_known = key == "role" and value in ROLES
            if not is_known and forged([*earlier, {**messages[number], key: ""}]) is None:
                return (
                    f"messages[{number}][{key!r}] spells the special token {name}, itself or in what the chat "
                    "template makes of it; take it out"
                )
        return (
            f"chat template: the special token {name} may come from a message or from tools; write special tokens "
            "with {{ }}, + or ~ in the template, and do not change them afterwards"
        )

    def spans(self, messages: Sequence[Mapping], tools: Any = None) -> list[str]:
        """The rendered conversation split into context, answer, context, answer, ..., without gaps.

        An answer is what the template writes for one message of the assistant, from the end of the generation prompt
        to the end of the turn. Raises ValueError if there is none, or if the rendering of the first messages is not a
        prefix of the whole, so that the answer cannot be located.
        """
        self.render(messages, tools=tools)  # refuses what is forged
        whole = self._render(messages, tools, False)
        spans = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # special tokens in these are also in the whole
            before = self._render(messages[:number], tools, True)
            after = self._render(messages[: number + 1], tools, False)
            if not (done <= len(before) <= len(after) and after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"chat template: the conversation up to message {number + 1} is not rendered as a prefix of the "
                    "whole, so its answer cannot be located; use a template that only appends"
                )
            spans += [whole[done : len(before)], whole[len(before) : len(after)]]
            done = len(after)
        if not spans:
            raise ValueError("the conversation has no message with the role assistant to learn from")
        spans += [whole[done:]] if done < len(whole) else []
        return [self._finished(span) for span in spans]


# Where the template writes another token for an image than the one that stands for it in the tokens: (that token, the
# text in its place), as the processors of Gemma 3 and InternVL have it.
IMAGE_TEXTS = {
    "<image_soft_token>": (
        "<start_of_image>",
        "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    ),
    "<IMG_CONTEXT>": ("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
}


def image_text(image_token: str) -> tuple[str, str]:
    """(what marks the place of an image in a text, what the model reads there, with the image token once)."""
    return IMAGE_TEXTS.get(image_token, (image_token, image_token))


def load_chat_template(
    tokenizer: Tokenizer, path: str | None = None, media_tokens: Mapping[str, str] | None = None
) -> ChatTemplate:
    """The template in the file `path`; None: the one next to the tokenizer (chat_template.jinja, or `chat_template` of
    one of TEMPLATE_FILES), else CHATML. media_tokens: what ChatTemplate writes for media."""
    return find_chat_template(tokenizer, path, media_tokens) or _template(tokenizer, CHATML, media_tokens)


def find_chat_template(
    tokenizer: Tokenizer, path: str | None = None, media_tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """Like load_chat_template, but None for a tokenizer without a template."""
    file = tokenizer.path
    source = None
    if path is None and file:
        named = (read_json(beside(file, name)).get("chat_template") for name in TEMPLATE_FILES)
        source = next((found for found in named if found), None)
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        path = beside(file, "chat_template.jinja")
        path = path if os.path.exists(path) else None
    if path is not None:
        if not os.path.isfile(path):
            raise ValueError(f"--chat_template={path}: the file does not exist")
        with open(path, encoding="utf-8") as template:
            source = template.read()
    return _template(tokenizer, source, media_tokens) if source else None


def _template(tokenizer: Tokenizer, source: str, media_tokens: Mapping[str, str] | None) -> ChatTemplate:
    return ChatTemplate(source, configured_tokens(tokenizer.path), tokenizer.special_tokens, media_tokens)
