"""PUT /api: the interface of Megatron-LM's text generation server, for clients that were written for it.

Fields and answers are those of Megatron Core's MegatronGenerate (megatron/core/inference/text_generation_server in
https://github.com/NVIDIA/Megatron-LM). Fields without a counterpart here are accepted with the value that turns them
off, and refused with any other.
"""

import secrets
from typing import Annotated, Any

from pydantic import Field, model_validator

from megajax.inference.engine import Engine
from megajax.inference.server.answers import TokenTexts, finite
from megajax.inference.server.engine_thread import Generation
from megajax.inference.server.protocol import Model, Refused, refusing_values
from megajax.inference.tokens.sampling import Sampling

PATH = "/api"
MAX_PROMPTS = 128
OFF = {
    "top_n_logprobs": 0,
    "top_p_decay": 0.0,
    "top_p_bound": 0.0,
    "stop_on_eol": False,
    "stop_on_double_eol": False,
    "prevent_newline_after_colon": False,
    "beam_width": None,
    "length_penalty": 1,
}
"""Fields without a counterpart here, with the value that turns them off."""


class MegatronRequest(Model):
    prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    tokens_to_generate: Annotated[int, Field(ge=0)] = 64
    """0: only the log-probabilities of the prompts."""
    logprobs: bool = False
    """Of all tokens after the first, those of the prompt included."""
    temperature: float = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    """1: always the most likely token; 0: all."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: all."""
    add_BOS: bool = False
    """Begin each prompt with the end-of-document token."""
    stop_token: int | None = None
    """Ends a text, besides the end of the document."""
    random_seed: int | None = None
    """None, -1: every request draws its own."""
    no_log: bool = False
    """Texts are never logged."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_off(cls, fields: Any) -> Any:
        """Fields that are left are refused as unknown."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in OFF or value != OFF[name]}

    def sampling(self) -> Sampling:
        """Raises Refused for a value that is not allowed."""
        if self.tokens_to_generate == 0 and not self.logprobs:
            message = "tokens_to_generate=0 generates nothing; use at least 1, or logprobs=true"
            raise Refused(400, message, "tokens_to_generate")
        if self.top_k and self.top_p:
            raise Refused(400, f"top_k={self.top_k} and top_p={self.top_p}: set only one of them", "top_k")
        sampling = Sampling(
            max_tokens=self.tokens_to_generate,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=secrets.randbits(32) if self.random_seed in (None, -1) else self.random_seed,
            stop_token_ids=() if self.stop_token is None else (self.stop_token,),
            logprobs=0 if self.logprobs else None,
            prompt_logprobs=0 if self.logprobs else None,
        )
        with refusing_values():
            sampling.check()
        return sampling

    def encoded(self, engine: Engine) -> list[list[int]]:
        """Tokens of the prompts. Raises ValueError for an empty one, unless it begins with a token of its own."""
        if not self.add_BOS:
            return [engine.encode(prompt) for prompt in self.prompts]
        if engine.tokenizer.eod_id is None:
            raise ValueError("add_BOS=true needs a tokenizer with an end-of-document token; leave it out")
        return [[engine.tokenizer.eod_id, *engine.tokenizer.encode(prompt)] for prompt in self.prompts]


async def answered(request: MegatronRequest, generation: Generation, texts: TokenTexts) -> dict[str, Any]:
    """Each list has an entry per prompt: the prompt and what follows. Raises what `Generation.parts` does."""
    text = list(request.prompts)
    tokens = [list(each.prompt) for each in generation.requests]
    logprobs: list[list[float]] = [[] for _ in text]
    async for number, output in generation.parts():
        text[number] += output.text
        tokens[number] += output.tokens
        logprobs[number] += [finite(entry.logprob) for entry in output.logprobs or []]
    answer = {"text": text, "tokens": tokens, "segments": [[texts.of(token) for token in row] for row in tokens]}
    if request.logprobs:
        of_prompts = [[finite(entry.logprob) for entry in each.prompt_logprobs] for each in generation.requests]
        answer["logprobs"] = [first + then for first, then in zip(of_prompts, logprobs, strict=True)]
    return answer
