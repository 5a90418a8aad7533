"""infer.py generate and chat: text is printed while it is generated."""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from megajax.cli.options import OfChats, OfEngine, OfSampling, check_is_new, read_lines
from megajax.fields.ranges import changed_fields
from megajax.inference.config import Sampling, ServingConfig

if TYPE_CHECKING:
    from megajax.data.tokenizers.chat_template import ChatTemplate
    from megajax.inference.engine import Engine
    from megajax.inference.results import Output
    from megajax.inference.scheduling.images import PromptImage
    from megajax.inference.sequence_to_sequence import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfEngine, OfSampling):
    """Continue prompts."""

    prompt: tuple[str, ...] = ()
    """Text to continue; may be repeated."""
    image: tuple[str, ...] = ()
    """Image file that each prompt is about; may be repeated. The prompts mark their places as the model's texts do
    (<image>), or the images come first."""
    prompts: str | None = None
    """File with a prompt per line; .jsonl: objects with the field prompt."""
    output: str | None = None
    """New file for a line of JSON per prompt; -: standard output."""
    num_beams: int = 1
    """Beam search, for models with an encoder."""
    database: str | None = None
    """For models that read neighbours: PREFIX of the dataset in which they are looked up (megajax retrieve build);
    without it none are read."""

    def __call__(self) -> None:
        from megajax.weights.sources import open_source

        sampling = self.seeded()
        if (self.prompts is None) == (not self.prompt):
            raise ValueError("give --prompt, which may be repeated, or --prompts=FILE")
        prompts = read_prompts(self.prompts) if self.prompts else self.prompt
        check_is_new(self.output)
        check_images(self.image)
        self.serving.check()  # an error in the settings comes before anything is opened
        self.mesh.check()
        source = open_source(self.run, self.step)
        self.say_seed(sampling)
        model = source.config.model
        if self.database is not None and model.neighbours is None:
            raise ValueError(f"database={self.database}: model.kind={model.kind} reads no neighbours; leave it out")
        if model.reads_source or model.neighbours is not None:
            if self.image:
                raise ValueError(f"image={self.image[0]}: model.kind={model.kind} reads no images; leave it out")
            written = self._written(prompts, sampling) if model.reads_source else self._continued(prompts, sampling)
            with self._file() as file:
                print_written(prompts, written, file)
            return
        if self.num_beams != 1:
            raise ValueError(f"num_beams={self.num_beams} is for models with an encoder; leave it out")
        engine = self.engine()
        images = read_images(engine, self.image)
        with self._file() as file:
            if file is None:
                print_texts(engine, prompts, sampling, images)
            else:
                write_records(engine, prompts, sampling, file, images)

    def _file(self) -> contextlib.AbstractContextManager[TextIO | None]:
        if self.output is None or self.output == "-":
            return contextlib.nullcontext(sys.stdout if self.output else None)
        return open(self.output, "x", encoding="utf-8")

    def _written(self, prompts: Sequence[str], sampling: Sampling) -> "list[Written]":
        """By a model that reads a text and writes another."""
        from megajax.inference.sequence_to_sequence import SequenceToSequence

        self._check_no_engine()
        return SequenceToSequence(self.open()).write(prompts, sampling, self.num_beams)

    def _continued(self, prompts: Sequence[str], sampling: Sampling) -> "list[Written]":
        """By a model that reads neighbours."""
        from megajax.inference.with_database import WriterWithDatabase
        from megajax.retrieval.database import Database

        self._check_no_engine()
        if self.num_beams != 1:
            raise ValueError(f"num_beams={self.num_beams} is for models with an encoder; leave it out")
        opened = self.open()
        database = None
        if self.database is not None:
            assert (inputs := opened.model.config.neighbours) is not None
            database = Database.open(self.database, inputs)
        writer = WriterWithDatabase(opened, None if database is None else database.neighbours_of)
        found = writer.write(prompts, sampling)
        # as the engine prints them: the prompt and its continuation
        if self.output is None:
            return [one._replace(text=prompt + one.text) for prompt, one in zip(prompts, found, strict=True)]
        return found

    def _check_no_engine(self) -> None:
        given = changed_fields(self.serving, ServingConfig()) + ["draft_run"] * (self.draft_run is not None)
        if given:
            raise ValueError(f"{given[0]} is for the engine, which does not run this model; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(OfEngine, OfSampling, OfChats):
    """Chat in the terminal."""

    system: str = ""
    """System message."""
    image: tuple[str, ...] = ()
    """Image file that the conversation is about; may be repeated."""

    def __call__(self) -> None:
        sampling = self.seeded()
        self.check_template()
        check_images(self.image)
        engine = self.engine()
        images = read_images(engine, self.image)
        self.say_seed(sampling)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on ctrl-C ends an answer
        template = self.template(engine)
        room = engine.prompts.room(sampling.max_tokens) - sum(image.num_tokens - 1 for image in images)
        if room < 1:
            most = sampling.max_tokens + room - 1
            raise ValueError(f"max_tokens={sampling.max_tokens} leaves no room for a prompt; use at most {most}")
        if template is not None:
            conversation = TemplatedConversation(engine, template, room, self.system, len(images))
            chat(engine, conversation, sampling, images)
            return
        if self.image:
            raise ValueError(
                f"image={self.image[0]} needs a chat template, which {self.run} has not; use --chat_template=FILE, or "
                "infer.py generate --image"
            )
        if self.system:
            raise ValueError(
                f"system={self.system!r} needs a chat template, which {self.run} has not; use --chat_template=FILE"
            )
        _say("(the model has no chat template: it continues the text of the conversation)")
        chat(engine, PlainConversation(engine, room), sampling)


def read_prompts(path: str) -> list[str]:
    """One prompt per line; in a .jsonl file each line is an object with the field prompt. Raises ValueError."""
    lines = read_lines(path, "prompts", "prompt")
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1)] if path.endswith(".jsonl") else lines


def _prompt(path: str, number: int, line: str) -> str:
    try:
        found = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError):
        found = None
    if not isinstance(found, str):
        raise ValueError(f"prompts={path}: line {number} is not an object with a text as prompt")
    return found


def check_images(paths: Sequence[str]) -> None:
    """Raises ValueError for what is no file."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"image={path} is not a file; name an image")


def read_images(engine: "Engine", paths: Sequence[str]) -> "list[PromptImage]":
    return [engine.prompts.read_image(Path(path).read_bytes(), f"image={path}") for path in paths]


def print_texts(
    engine: "Engine", prompts: Sequence[str], sampling: Sampling, images: "Sequence[PromptImage]" = ()
) -> None:
    """Prints each prompt and its continuation, in the order of the prompts."""
    heads = [f"--- {number} of {len(prompts)}\n" if len(prompts) > 1 else "" for number in range(1, len(prompts) + 1)]
    texts = [head + prompt for head, prompt in zip(heads, prompts, strict=True)]
    is_finished = [False] * len(prompts)
    shown = 0  # number of the text that is being printed
    printed = 0  # its characters so far
    encoded = [engine.prompts.encode(prompt, len(images)) for prompt in prompts]
    for number, output in _outputs(engine, encoded, sampling, images):
        texts[number] += output.text
        is_finished[number] = output.finish_reason is not None
        while shown < len(texts):
            print(texts[shown][printed:], end="", flush=True)
            printed = len(texts[shown])
            if not is_finished[shown]:
                break
            shown += 1
            printed = 0
            print("\n" if shown < len(texts) else "")


def write_records(
    engine: "Engine",
    prompts: Sequence[str],
    sampling: Sampling,
    file: TextIO,
    images: "Sequence[PromptImage]" = (),
) -> None:
    """A line of JSON for each prompt, in their order, as soon as it and those before it have finished."""
    encoded = [engine.prompts.encode(prompt, len(images)) for prompt in prompts]
    records: list[dict[str, Any]] = [
        {"prompt": prompt, "text": "", "finish_reason": None, "prompt_tokens": len(tokens), "tokens": 0}
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    written = 0
    for number, output in _outputs(engine, encoded, sampling, images):
        record = records[number]
        record["text"] += output.text
        record["tokens"] += len(output.tokens)
        record["finish_reason"] = output.finish_reason
        while written < len(records) and records[written]["finish_reason"] is not None:
            print(json.dumps(records[written], ensure_ascii=False), file=file, flush=True)
            written += 1


def print_written(prompts: Sequence[str], written: Sequence["Written"], file: TextIO | None) -> None:
    """Prints the texts that follow from the prompts. file: for a line of JSON for each instead, as write_records."""
    for prompt, found in zip(prompts, written, strict=True):
        if file is None:
            print(found.text)
            continue
        record = {
            "prompt": prompt,
            "text": found.text,
            "finish_reason": found.finish_reason,
            "prompt_tokens": found.prompt_tokens,
            "tokens": len(found.tokens),
        }
        print(json.dumps(record, ensure_ascii=False), file=file)


def _outputs(
    engine: "Engine", prompts: Sequence[Sequence[int]], sampling: Sampling, images: "Sequence[PromptImage]" = ()
) -> "Iterator[tuple[int, Output]]":
    """images: of each prompt, the same."""
    from megajax.inference.engine import outputs_of

    return outputs_of(engine, [(prompt, sampling) for prompt in prompts], images)


# ----------------------------------------------------------------------------- chat


class Conversation(Protocol):
    def ask(self, text: str) -> list[int]:
        """The tokens to continue after this input. Raises ValueError for one that cannot be used."""

    def answered(self, text: str) -> None: ...


class TemplatedConversation:
    def __init__(self, engine: "Engine", template: "ChatTemplate", room: int, system: str = "", num_images: int = 0):
        """room: tokens that prompts may have. num_images: before the first input."""
        self._engine = engine
        self._template = template
        self._room = room
        self._system = [{"role": "system", "content": system}] if system else []
        self._images: list[dict[str, str]] = [{"type": "image"}] * num_images
        self._messages: list[dict[str, Any]] = []

    def ask(self, text: str) -> list[int]:
        messages = [*self._messages, {"role": "user", "content": text}]
        tokens = self._tokens(messages)
        while len(tokens) > self._room and len(messages) > 1:
            messages = messages[2:]  # the oldest input and its answer
            tokens = self._tokens(messages)
            _say("(the beginning of the conversation no longer fits and is forgotten)")
        if len(tokens) > self._room:
            raise ValueError(f"the input has {len(tokens)} tokens, and only {self._room} fit; write less")
        self._messages = messages
        return tokens

    def answered(self, text: str) -> None:
        for name in self._engine.prompts.tokenizer.special_tokens:  # which the template refuses in a message
            text = text.replace(name, "")
        self._messages.append({"role": "assistant", "content": text})

    def _tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        first, *later = messages
        if self._images:
            first = {**first, "content": [*self._images, {"type": "text", "text": first["content"]}]}
        text = self._template.render([*self._system, first, *later], add_generation_prompt=True)
        return self._engine.prompts.tokenizer.encode_template(text)


class PlainConversation:
    """Text that the model continues, for models without a chat template: each input and a newline, each answer and a
    newline."""

    def __init__(self, engine: "Engine", room: int):
        """room: tokens that prompts may have."""
        self._engine = engine
        self._room = room
        self._text = ""

    def ask(self, text: str) -> list[int]:
        self._text += text + "\n"
        tokens = self._engine.prompts.encode(self._text)
        if len(tokens) > self._room:
            tokens = tokens[-self._room :]
            self._text = self._engine.prompts.tokenizer.decode(tokens)
            _say("(the beginning of the conversation no longer fits and is forgotten)")
        return tokens

    def answered(self, text: str) -> None:
        self._text += text + "\n"


def chat(
    engine: "Engine", conversation: Conversation, sampling: Sampling, images: "Sequence[PromptImage]" = ()
) -> None:
    """Until an empty line or the end of the input; ctrl-C ends an answer."""
    while line := _read_line():
        try:
            tokens = conversation.ask(line)
        except ValueError as error:
            _say(f"error: {error}")
            continue
        answer = ""
        try:
            for _, output in _outputs(engine, [tokens], sampling, images):
                answer += output.text
                print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print()
        conversation.answered(answer)


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr)
