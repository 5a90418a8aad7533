"""Text of a conversation by a chat template, and which of it are the answers."""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megajax.data.tokenizers.tokenizer import Tokenizer, beside, configured_tokens, read_json

# The template of a tokenizer without one. https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """Text of a conversation by a jinja2 template, as Hugging Face calls it (names, settings, raise_exception).

    The template runs in a sandbox and sees no clock: the same messages are always the same text. variables: what it
    may name besides messages, tools and add_generation_prompt, such as bos_token. Messages that spell one of
    `special_tokens` are refused: what somebody wrote must not become a token that steers the model.
    Pickles as its arguments. Raises ValueError if the template cannot be compiled.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special_tokens: Iterable[str]):
        try:
            import jinja2.sandbox
        except ImportError:
            raise ValueError("chat templates need the package jinja2; pip install 'megajax[data]'") from None
        self.source, self.variables, self.special_tokens = source, dict(variables), tuple(special_tokens)
        text = json.dumps([source, self.variables], sort_keys=True)
        self.identity = hashlib.sha256(text.encode()).hexdigest()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str):
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        # the one of jinja2 escapes for HTML
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from None

    def __reduce__(self):
        return type(self), (self.source, self.variables, self.special_tokens)

    def render(self, messages: Sequence[Mapping], *, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """add_generation_prompt: end with what comes before an answer. ValueError if the template or a message
        cannot be used."""
        for text in _strings([messages, tools]):
            if found := next((name for name in self.special_tokens if name in text), None):
                raise ValueError(f"a message spells the special token {found}; take it out")
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.variables
            )
        except Exception as error:  # a template can fail as any program can
            raise ValueError(f"chat template: {type(error).__name__}: {error}") from None

    def spans(self, messages: Sequence[Mapping], tools: Any = None) -> list[str]:
        """The rendered conversation cut into context, answer, context, answer, ...; joined it is the rendering.

        An answer is what the template writes for one message of the assistant, from the end of the generation prompt
        to the end of the turn. Raises ValueError if there is none, or if the template writes a conversation so far
        differently from the beginning of the whole: then nothing says which of its text is the answer.
        """
        whole, spans, done = self.render(messages, tools=tools), [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], tools=tools, add_generation_prompt=True)
            after = self.render(messages[: number + 1], tools=tools)
            if not (done <= len(before) <= len(after) and after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"chat template: the conversation up to message {number + 1} is not rendered as the beginning of "
                    "the whole, so its answer cannot be told; use a template that only adds to what it wrote"
                )
            spans += [whole[done : len(before)], whole[len(before) : len(after)]]
            done = len(after)
        if not spans:
            raise ValueError("the conversation has no message of the role assistant to learn from")
        return spans + [whole[done:]] if done < len(whole) else spans


def load_chat_template(tokenizer: Tokenizer, path: str | None = None) -> ChatTemplate:
    """The template in the file `path`; None: the one beside the tokenizer (chat_template.jinja, or `chat_template` of
    tokenizer_config.json), else CHATML."""
    file = getattr(tokenizer, "path", None)
    variables = configured_tokens(file) if file else {}
    source = None
    if path is None and file:
        source = read_json(beside(file, "tokenizer_config.json")).get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        path = beside(file, "chat_template.jinja")
        path = path if os.path.exists(path) else None
    if path is not None:
        if not os.path.isfile(path):
            raise ValueError(f"--chat_template={path}: the file does not exist")
        with open(path, encoding="utf-8") as template:
            source = template.read()
    return ChatTemplate(source or CHATML, variables, tokenizer.special_tokens)


def _strings(value: Any) -> Iterator[str]:
    """All texts within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)
