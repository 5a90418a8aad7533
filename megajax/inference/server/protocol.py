"""The requests that the server understands: OpenAI's fields, and those that vLLM adds (top_k, min_p, ...).

https://platform.openai.com/docs/api-reference. Unknown fields are refused, so that nothing is ignored silently, except
those in `Request` that do not concern the answer.
"""

import base64
import contextlib
import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    field_validator,
)

from megajax.inference.config import MAX_LOGPROBS, Sampling

MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_CONVERTED = 1 << 21
"""Characters or tokens of /tokenize and /detokenize, which may be more than the model supports."""
MAX_BIASES = 1024
MAX_SAMPLES = 128
MAX_STOP_TOKENS = 128
DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's; an answer in a chat may be as long as the model allows."""
ANY_OBJECT = {"type": "object"}
"""The JSON schema of response_format={"type": "json_object"}."""

Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Count = Annotated[int, Field(ge=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Refused(Exception):
    """A request that cannot be answered; becomes an answer in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Model):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Model):
    """As in vLLM."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None


class Request(Model):
    """What completions and chats have in common. None: the default of the server, or of Sampling."""

    model: str | None = None
    n: Samples | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    # Without effect on the answer:
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(
        self, defaults: Mapping[str, float], max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> Sampling:
        """defaults: of the server. Without a seed, every request draws its own. Raises Refused for a value that is not
        allowed."""
        copied = (
            "temperature", "top_p", "min_p", "n", "ignore_eos", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "stop", "stop_token_ids",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in copied}
        given["seed"] = secrets.randbits(32) if self.seed is None else self.seed
        given["top_k"] = 0 if self.top_k == -1 else self.top_k  # how vLLM writes "all"
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given |= self._structure()
        values: dict[str, Any] = dict(defaults) | {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        sampling = Sampling(**values)
        with refusing_values():
            sampling.check()
        return sampling

    def _structure(self) -> dict[str, str | None]:
        wanted = self.structured_outputs or StructuredOutputs()
        schema = wanted.json_
        form = self.response_format
        if form is not None and form.type == "json_object":
            schema = ANY_OBJECT
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise Refused(400, "response_format.type=json_schema needs json_schema", "response_format.json_schema")
            schema = form.json_schema.schema_
        schema = None if schema is None else json.dumps(schema)
        return {"schema": schema, "regex": wanted.regex, "grammar": wanted.grammar}


def _listed_prompts(prompt: Any, check: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    try:
        prompts = check(prompt)
    except ValidationError:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists") from None
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must hold 1 to {MAX_PROMPTS} texts; {len(prompts)} are given")
    return prompts


Prompts = Annotated[list[str] | list[list[int]], WrapValidator(_listed_prompts)]


class CompletionRequest(Request):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class EmbeddingRequest(Model):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    """Without effect."""


def _plain_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as chat templates expect it: content as one text, or with images as a list of parts, arguments of
    tool calls as objects."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"[{number}] needs a role")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [_plain_part(number, part) for part in content]
        has_images = any(part["type"] == "image" for part in parts)
        plain["content"] = parts if has_images else "".join(part["text"] for part in parts)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"[{number}].content must be a text or a list of parts")
    # templates ask whether the field exists
    if calls := plain.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise ValueError(f"[{number}].tool_calls must be a list")
        plain["tool_calls"] = [_with_arguments(number, call) for call in calls]
    return plain


def _plain_part(number: int, part: Any) -> dict[str, Any]:
    """-> {"type": "text", "text"} or {"type": "image", "source"}: the bytes of a file, or an address."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = part.get("image_url") if isinstance(part, dict) else None
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise ValueError(f"[{number}].content: only parts of the types text and image_url are supported")
    if not url.startswith("data:"):
        return {"type": "image", "source": url}
    kind, comma, data = url.partition(",")
    if not kind.startswith("data:image/") or not kind.endswith(";base64") or not comma:
        raise ValueError(f"[{number}].content: image_url={url[:40]!r}... must be data:image/TYPE;base64,DATA")
    try:
        return {"type": "image", "source": base64.b64decode(data, validate=True)}
    except ValueError:
        raise ValueError(f"[{number}].content: the data of image_url is not base64") from None


def text_of(message: Mapping[str, Any]) -> str:
    """Of the content of a message of `Messages`."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes | str]:
    """The image files, or their addresses, in messages of `Messages`, in their order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part["source"] for content in contents for part in content if part["type"] == "image"]


def _with_arguments(number: int, call: Any) -> dict[str, Any]:
    try:
        arguments = call["function"]["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            raise TypeError
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ValueError(f"[{number}].tool_calls: each needs function.arguments with an object as JSON") from None
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_plain_message(number, message) for number, message in enumerate(messages)]


Messages = Annotated[
    list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_plain_messages)
]


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they are, because templates show them to the model."""
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ValueError(f'[{number}] must be {{"type": "function", "function": {{...}}}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"[{number}].function needs a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ValueError(f"[{number}].function.parameters must be a JSON schema of the type object")
    return tools


Tools = Annotated[list[dict[str, Any]], AfterValidator(_checked_tools)]


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Request):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice", mode="wrap")
    @classmethod
    def _known_choice(cls, choice: Any, check: Any) -> Any:
        try:
            return check(choice)
        except ValidationError:
            named = '{"type": "function", "function": {"name": NAME}}'
            raise ValueError(f"must be auto, none, required or {named}") from None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model may call."""
        return (self.tools or None) if self.tool_choice != "none" else None

    @property
    def demanded_functions(self) -> list[dict[str, Any]]:
        """The functions of which the model has to call one; none: it may answer with text. Raises Refused."""
        if self.tool_choice in (None, "auto", "none"):
            return []
        functions = [tool["function"] for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            functions = [each for each in functions if each["name"] == self.tool_choice.function.name]
        if not functions:
            raise Refused(400, "tool_choice demands a call of a tool that is not in tools; add it there", "tool_choice")
        return functions


def _as_messages(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(Model):
    model: str | None = None
    input: Annotated[Messages, BeforeValidator(_as_messages)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    previous_response_id: None = None
    # Without effect on the answer:
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    wants_usage: ClassVar[bool] = True

    @field_validator("previous_response_id", mode="before")
    @classmethod
    def _nothing_is_stored(cls, given: Any) -> None:
        if given is not None:
            raise ValueError("this server stores no answers; send the whole conversation as input")

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*first, *self.input]

    def sampling(self, defaults: Mapping[str, float], max_tokens: int) -> Sampling:
        """As of Request."""
        return Request(temperature=self.temperature, top_p=self.top_p).sampling(defaults, max_tokens, None)


class TokenizeRequest(Model):
    """prompt, or messages with tools."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_CONVERTED)] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_CONVERTED)]


class LoadRequest(Model):
    run: str | None = None
    """Default: the directory that is served."""
    step: int | None = None
    """Default: the newest."""


# ----------------------------------------------------------------------------- refusing

Kind = TypeVar("Kind", bound=Model)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Raises Refused, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        raise Refused(400, f"{param} is not supported", param)
    message = first["msg"].removeprefix("Value error, ")
    raise Refused(400, f"{param}: {message}" if param else message, param)


@contextlib.contextmanager
def refusing_values() -> Generator[None]:
    """A ValueError becomes Refused, with the field that its message begins with."""
    try:
        yield
    except ValueError as error:
        field, equals, _ = str(error).partition("=")
        raise Refused(400, str(error), field if equals and field.isidentifier() else None) from None
