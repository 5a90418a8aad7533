"""What the calls of the device have generated, as outputs of requests: tokens, final text, log-probabilities, and why a
sample ends."""

import dataclasses
from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

from megajax.data.tokenizers.tokenizer import Tokenizer, end_ids
from megajax.inference.device.programs import Drawn
from megajax.inference.scheduling.scheduler import Scheduler
from megajax.inference.scheduling.work import Decode, Prefill, Request, Run, Sequence
from megajax.inference.tokens.sampling import Logprobs, TokenLogprobs
from megajax.inference.tokens.text import TextStream


class Output(NamedTuple):
    """What is new of one sample of a request."""

    request: Request
    index: int
    """Which of its n samples."""
    tokens: list[int]
    """New tokens, without the one that ends the text."""
    text: str
    """New text that is final; incomplete characters and what may begin a stop text are held back. Empty without a
    tokenizer."""
    logprobs: list[TokenLogprobs] | None
    """One per new token, if sampling.logprobs asks for them."""
    finish_reason: Literal["stop", "length", "cancelled"] | None
    stop_reason: str | int | None
    """The stop text, or the token that ended the text."""

    def joined(self, later: "Output") -> "Output":
        """later: what follows."""
        logprobs = None if self.logprobs is None else [*self.logprobs, *(later.logprobs or [])]
        tokens = [*self.tokens, *later.tokens]
        return later._replace(tokens=tokens, text=self.text + later.text, logprobs=logprobs)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the engine was made, except for what is running, waiting and used now."""

    num_running: int
    num_waiting: int
    pages_used: int
    num_pages: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Those that were found."""
    prompt_tokens: int
    """Computed prompt tokens, preempted ones each time."""
    generated_tokens: int
    preemptions: int
    drafted: int
    """Tokens guessed by speculative decoding."""
    accepted: int
    """Those that were right."""
    compiled_programs: int = 0
    """By XLA, in the process of the engine if it has one of its own."""


class Results:
    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        """scheduler: is told which sequences finish. tokenizer: None: no texts, and no token that ends a document."""
        self.num_generated = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._ends = end_ids(tokenizer) if tokenizer else frozenset()
        self.texts: dict[Sequence, TextStream] = {}
        """Of the sequences that have not finished."""
        self._outputs: list[Output] = []

    def start(self, sequence: Sequence) -> None:
        """Begins the text of a sequence that was submitted."""
        if self._tokenizer is not None:
            request = sequence.request
            prompt = [token for token in request.prompt if token >= 0]  # below 0: of an image
            self.texts[sequence] = TextStream(self._tokenizer, prompt, request.sampling.stop)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence, unless it has finished."""
        if not sequence.is_finished:
            self._finish(sequence, [], "", None, "cancelled", None)

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def take(self) -> list[Output]:
        """The outputs since it was last called."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def read(
        self, work: Prefill | Decode, drawn: Drawn, of_prompt: Logprobs | None = None, of_beside: Drawn | None = None
    ) -> None:
        """Hands the results of a call, which are on the host, to its sequences."""
        if isinstance(work, Decode):
            return self._read_runs(work.runs, drawn)
        if of_beside is not None:
            self._read_runs(work.beside, of_beside)
        if of_prompt is not None:
            self._read_prompt(work, of_prompt)
        tokens_M = drawn.tokens.tolist()
        for number, chunk in enumerate(chunk for chunk in work.chunks if chunk.is_last):
            self._add(chunk.sequence, [tokens_M[number]], drawn, [(number,)])

    def _read_runs(self, runs: Items[Run], drawn: Drawn) -> None:
        """drawn: [steps, rows]; several steps of the row of a run, or with a draft one step, with a row for each
        token."""
        tokens_SB = drawn.tokens.tolist()
        row = 0
        for run in runs:
            if run.draft:
                places = [(0, row + number) for number in range(run.count)]
            else:
                places = [(step, row) for step in range(run.count)]
            tokens = [tokens_SB[step][at] for step, at in places]
            count = self._accept(run, tokens) if run.draft else run.count
            self._add(run.sequence, tokens[:count], drawn, places)
            row += 1 + len(run.draft)

    def _accept(self, run: Run, tokens: list[int]) -> int:
        """The number of tokens that were computed for right guesses, and one more."""
        pairs = zip(run.draft, tokens, strict=False)
        accepted = next((number for number, (guess, token) in enumerate(pairs) if guess != token), len(run.draft))
        if not run.sequence.is_finished:
            self.num_drafted += len(run.draft)
            self.num_accepted += accepted
            run.sequence.num_pending -= len(run.draft) - accepted
            run.sequence.num_written -= len(run.draft) - accepted
            run.sequence.num_drafted -= len(run.draft) - accepted
        return accepted + 1

    def _read_prompt(self, work: Prefill, of_prompt: Logprobs) -> None:
        token = 0
        for chunk in work.chunks:
            request = chunk.sequence.request
            found = request.prompt_logprobs
            if found is not None and not chunk.sequence.index:  # the first sample computes them for all
                following = request.prompt[len(found) + 1 : chunk.end + 1]
                for place, target in enumerate(following, token + len(found) - chunk.start):
                    found.append(_token_logprobs(target, of_prompt, place, request.sampling.prompt_logprobs))
            token += chunk.end - chunk.start

    def _add(self, sequence: Sequence, new: Items[int], drawn: Drawn, places: Items[tuple[int, ...]]) -> None:
        """Adds new tokens to a sequence, up to the one that ends it. places: of each in the arrays of drawn."""
        if sequence.is_finished:
            return
        sampling = sequence.request.sampling
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        text = ""
        for place, token in zip(places, new, strict=False):
            sequence.num_pending -= 1
            if len(sequence.tokens) == sequence.limit:  # max_tokens is 0
                return self._finish(sequence, tokens, text, logprobs, "length", None)
            is_end = token in self._ends and not sampling.ignore_eos
            if is_end or token in sampling.stop_token_ids:
                return self._finish(sequence, tokens, text, logprobs, "stop", token)
            tokens.append(token)
            sequence.tokens.append(token)
            if drawn.guesses is not None:
                sequence.guesses = tuple(drawn.guesses[place].tolist())
            self.num_generated += 1
            if logprobs is not None:
                assert drawn.logprobs is not None
                logprobs.append(_token_logprobs(token, drawn.logprobs, place, sampling.logprobs))
            stream = self.texts.get(sequence)
            if stream is not None:
                text += stream.add(token)
                if stream.stopped_by is not None:
                    return self._finish(sequence, tokens, text, logprobs, "stop", stream.stopped_by)
            if sequence.matcher is not None:
                sequence.matcher.add(token)
                if sequence.matcher.is_finished:
                    return self._finish(sequence, tokens, text, logprobs, "stop", None)
            if len(sequence.tokens) == sequence.limit:
                return self._finish(sequence, tokens, text, logprobs, "length", None)
        self._outputs.append(Output(sequence.request, sequence.index, tokens, text, logprobs, None, None))

    def _finish(self, sequence: Sequence, tokens, text, logprobs, finish_reason, stop_reason) -> None:
        stream = self.texts.pop(sequence, None)
        if stream is not None and stream.stopped_by is None:
            text += stream.finish()
        self._scheduler.finish(sequence)
        arguments = (tokens, text, logprobs, finish_reason, stop_reason)
        self._outputs.append(Output(sequence.request, sequence.index, *arguments))


def _token_logprobs(token: int, found: Logprobs, place: int | tuple[int, ...], count: int | None) -> TokenLogprobs:
    pairs = zip(found.top_ids_BK[place][:count].tolist(), found.top_BK[place][:count].tolist(), strict=True)
    return TokenLogprobs(token, float(found.chosen_B[place]), list(pairs))
