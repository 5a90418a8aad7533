"""Generates text with a model: many requests at once, which come and go (continuous batching).

Keys and values are in pages (inference/pages.py), the scheduler decides what a call of the device computes
(inference/scheduler.py), the calls are in inference/programs.py. One thread owns an engine: it submits requests and
calls `step` until there is no work.
"""

import dataclasses
import functools
import logging
import threading
from collections import deque
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.data.tokenizers.tokenizer import Tokenizer, end_ids
from megajax.inference import programs
from megajax.inference.grammar import Grammars
from megajax.inference.load import open_model, serving_params
from megajax.inference.pages import PagePool
from megajax.inference.programs import Chooser, DecodeBatch, Drawn, PrefillBatch, Rows
from megajax.inference.sampling import PROMPT_TOKEN, RowSampling, Sampling, TokenLogprobs
from megajax.inference.scheduler import Decode, Limits, Prefill, Request, Run, Scheduler, Sequence, Wait
from megajax.inference.text import TextStream
from megajax.layers.kv_cache import PoolSizes
from megajax.mesh import MeshConfig
from megajax.models.model import Model
from megajax.parameters import is_per_layer
from megajax.ranges import PositiveInt

logger = logging.getLogger("megajax")

MIN_CHUNK = 16  # tokens of the smallest prefill program
MIN_TABLE = 16  # pages of the smallest table, where its size matters
MAX_CHUNKS = 16  # sequences whose prompts one call computes
DEFAULT_MAX_LENGTH = 8192  # tokens of a sequence, for models without a limit
WARM_UP_THREADS = 8  # each compiles a program
LOWERING = threading.Lock()  # two threads must not lower Pallas kernels at the same time (pallas_kernels/README.md)
HOST_POOL_BYTES = 2**30  # of the pools of all devices, where devices do not say how much memory they have (CPU)
PAGE_DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class ServingConfig:
    max_rows: PositiveInt = 128
    """Sequences that are decoded at the same time."""
    max_batch_tokens: PositiveInt = 4096
    """Prompt tokens per call; longer prompts are computed in chunks."""
    max_length: PositiveInt | None = None
    """Maximum tokens of a sequence, prompt included; None: what the model supports, or 8192 if it has no limit."""
    page_size: PositiveInt = 64
    """Tokens per page."""
    num_pages: PositiveInt | None = None
    """Pages of the pool; None: from memory_fraction."""
    memory_fraction: float = 0.9
    """Fraction of the device memory that JAX may use for weights and pages together; the rest is for activations."""
    page_dtype: Literal["compute", "int8", "float8"] = "compute"
    """How keys and values are stored: in the compute dtype, or in 8 bits."""
    prefix_cache: bool = True
    """Keep pages of finished requests for prompts that begin the same way."""
    decode_steps: PositiveInt = 4
    """Tokens per sequence of one call of the device."""
    draft_tokens: int = 0
    """Speculative decoding: guess up to this many tokens per sequence and step from its own text (prompt lookup); the
    result is the same. 0: off."""

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be above 0 and at most 1")
        if self.draft_tokens < 0:
            raise ValueError(f"draft_tokens={self.draft_tokens} must not be negative; 0: no speculative decoding")
        for name in ("max_rows", "max_batch_tokens", "page_size", "decode_steps", "max_length", "num_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


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


class Score(NamedTuple):
    """Of a prompt of T tokens, arrays [T - 1] for the tokens after the first."""

    logprobs: np.ndarray
    """float32."""
    is_greedy: np.ndarray
    """bool: whether the token is the most likely one."""


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


class _Call(NamedTuple):
    """A call of the device whose results the host has not read yet."""

    work: Prefill | Decode
    drawn: Drawn
    of_prompt: Any


class Engine:
    def __init__(
        self, model: Model, params: dict, mesh: Mesh, tokenizer: Tokenizer | None, *, start_ids: Items[int] = (),
        serving: ServingConfig = ServingConfig()
    ):  # fmt: skip
        """params: sharded over `mesh`, stacked or per layer; matrices are cast to the compute dtype. tokenizer: may be
        None if only tokens go in and out; there is then no end-of-document token. start_ids: tokens before each text
        prompt.

        Raises ValueError for invalid serving settings, and if the memory holds no page.
        """
        serving.check()
        self.model = model
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.serving = serving
        self.use(params)
        config = model.config
        self._vocab_size = min(config.vocab_size, tokenizer.vocab_size) if tokenizer else config.vocab_size
        self._ends = end_ids(tokenizer) if tokenizer else frozenset()
        self._start = list(start_ids)
        self._grammars = Grammars(tokenizer, self._vocab_size)
        self._allocate()
        self._programs: dict[tuple, Any] = {}
        self._calls: deque[_Call] = deque()
        self._texts: dict[Sequence, TextStream] = {}
        self._outputs: list[Output] = []
        self._no_mask: dict[int, jax.Array] = {}
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._drafted = 0
        self._accepted = 0

    def _allocate(self) -> None:
        """The pool, and what the device remembers of the running sequences."""
        serving = self.serving
        sizes = self._pool_sizes()
        most = sizes.num_pages * sizes.page_size
        self._max_length = min(self._longest(), most)
        table_pages = -(-self._max_length // sizes.page_size)
        num_chunks = min(MAX_CHUNKS, sizes.num_rows)
        self._sizes = sizes
        self._chunk_buckets = _buckets(MIN_CHUNK, max(serving.max_batch_tokens, MIN_CHUNK), 4)
        # The kernel reads only the pages of a sequence; the reference gathers the whole table.
        has_kernel = self.mesh.devices.flat[0].platform == "gpu"
        self._table_factor = None if has_kernel else 4
        self._row_buckets = _buckets(1, sizes.num_rows, 2 if has_kernel else 4)
        self._table_buckets = [table_pages] if has_kernel else _buckets(min(MIN_TABLE, table_pages), table_pages, 4)
        self._num_chunks = num_chunks
        chunk_pages = table_pages + self._chunk_pages(self._chunk_buckets[-1])
        self.pool = PagePool(sizes.num_pages, sizes.page_size, caches_prefixes=self._shares_pages())
        if serving.draft_tokens and self._has_states():
            raise ValueError(
                f"draft_tokens={serving.draft_tokens}: this model has layers with a state per sequence, which cannot "
                "take a wrong guess back; use draft_tokens=0"
            )
        longest_chunk = self._chunk_buckets[-1]
        limits = Limits(
            sizes.num_rows, longest_chunk, num_chunks, chunk_pages, serving.decode_steps, serving.draft_tokens
        )
        self.scheduler = Scheduler(self.pool, limits)
        replicated = NamedSharding(self.mesh, P())
        with jax.set_mesh(self.mesh):
            self._caches = jax.jit(functools.partial(self.model.config.new_pages, sizes, self.model.execution))()
            self._rows = jax.jit(
                functools.partial(Rows.zeros, sizes.num_rows, self._vocab_size), out_shardings=replicated
            )()
        cache_shardings = jax.tree.map(lambda a: a.sharding, self._caches)
        options = dict(donate_argnums=(1, 2))
        self._decode = jax.jit(
            functools.partial(programs.decode, self.model, self._vocab_size, sizes, serving.decode_steps),
            out_shardings=(cache_shardings, replicated, replicated),
            **options,
        )
        self._prefill = jax.jit(
            functools.partial(programs.prefill, self.model, self._vocab_size),
            out_shardings=(cache_shardings, replicated, replicated, replicated),
            **options,
        )
        self._start_row = jax.jit(Rows.start, donate_argnums=0, out_shardings=replicated)

    def use(self, params: dict) -> None:
        """Generates with these parameters, stacked or per layer, from here on; no program is compiled again.

        Forgets the prefix cache. Requests that run continue with the keys and values of the old parameters.
        """
        self.params = self.model.per_layer(_cast(self.model, params))
        if hasattr(self, "scheduler"):
            self.scheduler.forget()

    @staticmethod
    def from_run(
        run_dir: str | Path,
        mesh: MeshConfig | None = None,
        step: int | None = None,
        serving: ServingConfig = ServingConfig(),
    ) -> "Engine":
        """The model of a run directory, with the parameters of one step (default: the newest), or of a Hugging Face
        folder, on any mesh.

        mesh: default one device; a mesh smaller than the machine takes its first devices. Raises ValueError if the
        directory holds no run, no checkpoint or not that step, if the step or the tokenizer is damaged or does not
        belong to the run, or if the mesh does not divide the model.
        """
        serving.check()
        opened = open_model(run_dir, mesh, step)
        opened.model.config.check_generates()
        # Split here, so that the stacked arrays are gone before the memory for pages is counted.
        params = opened.model.per_layer(opened.restore())
        parts = (opened.model, params, opened.mesh, opened.tokenizer)
        return Engine(*parts, start_ids=opened.start_ids, serving=serving)

    # ------------------------------------------------------------------ whole generations

    def generate(self, prompts: Items[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, up to the end of the document, a stop text or max_tokens.

        An empty prompt starts a new document. Raises ValueError for invalid sampling settings and for a prompt that is
        too long.
        """
        found = self._generate([self.encode(prompt) for prompt in prompts], sampling)
        return ["".join(output.text for output in outputs) for outputs in found]

    def generate_tokens(self, prompts: Items[Items[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens that follow each prompt, without the token that ends it, but with a stop text."""
        found = self._generate(prompts, sampling)
        return [[token for output in outputs for token in output.tokens] for outputs in found]

    def score(self, prompts: Items[Items[int]]) -> list[Score]:
        """The log-probability of each token of the prompts after the first. A prompt may have as many tokens as the
        model supports."""
        requests = self._finish_all(prompts, Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=1))
        scores = []
        for request, _ in requests:
            found = request.prompt_logprobs
            logprobs = np.array([entry.logprob for entry in found], np.float32)
            scores.append(Score(logprobs, np.array([entry.token == entry.top[0][0] for entry in found], bool)))
        return scores

    def _generate(self, prompts: Items[Items[int]], sampling: Sampling) -> list[list[Output]]:
        if sampling.n > 1:
            raise ValueError(f"n={sampling.n}: generate gives one text per prompt; use submit for several")
        return [outputs for _, outputs in self._finish_all(prompts, sampling)]

    def _finish_all(self, prompts: Items[Items[int]], sampling: Sampling) -> list[tuple[Request, list[Output]]]:
        """Runs until these requests are finished; all of them are checked before the first one is queued."""
        for number, prompt in enumerate(prompts):
            self.check(prompt, sampling, f"prompt {number}")
        found = {request: [] for request in [self.submit(prompt, sampling) for prompt in prompts]}
        try:
            while not all(request.is_finished for request in found):
                for output in self.step():
                    if output.request in found:
                        found[output.request].append(output)
        finally:
            for request in found:
                self.cancel(request)
        return list(found.items())

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; for an empty one, the end-of-document token."""
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer to encode a text prompt; use generate_tokens")
        ids = self._start + self.tokenizer.encode(prompt)
        if not ids and self.tokenizer.eod_id is None:
            raise ValueError("prompt='' has no tokens and the tokenizer has no end-of-document token to start from; "
                             "give a prompt")  # fmt: skip
        return ids or [self.tokenizer.eod_id]

    def room_for_prompt(self, max_tokens: int) -> int:
        """Maximum number of prompt tokens that leaves room for max_tokens."""
        return self._max_length - max_tokens

    # ------------------------------------------------------------------ requests

    def submit(self, prompt: Items[int], sampling: Sampling) -> Request:
        """Queues a prompt, int tokens. Raises ValueError for invalid settings, and for a prompt that does not fit."""
        self.check(prompt, sampling)
        request = Request(list(prompt), sampling)
        limit = len(prompt) + sampling.max_tokens
        request.sequences = [Sequence(request, index, list(prompt), limit) for index in range(sampling.n)]
        if sampling.prompt_logprobs is not None:
            request.prompt_logprobs = []
        for sequence in request.sequences:
            sequence.matcher = self._grammars.start(sampling)
            if self.tokenizer is not None:
                self._texts[sequence] = TextStream(self.tokenizer, request.prompt, sampling.stop)
            self.scheduler.waiting.append(sequence)
        return request

    def check(self, prompt: Items[int], sampling: Sampling, name: str = "prompt") -> None:
        """Raises ValueError, naming the prompt, for what `submit` refuses."""
        sampling.check()
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop} needs a tokenizer; the engine has none")
        self._grammars.start(sampling)
        for field in ("stop_token_ids", "logit_bias"):
            wrong = [token for token in getattr(sampling, field) if not 0 <= token < self._vocab_size]
            if wrong:
                raise ValueError(f"{field}={wrong[0]} is not a token; tokens are 0 to {self._vocab_size - 1}")
        if len(prompt) == 0:
            raise ValueError(f"{name} has no tokens; give at least one")
        if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
            raise ValueError(
                f"{name} has token ids {min(prompt)} to {max(prompt)}; "
                f"they must be below model.vocab_size={self.model.config.vocab_size}"
            )
        if len(prompt) > self.room_for_prompt(sampling.max_tokens):
            way_out = f"use max_tokens={self._max_length - len(prompt)} or less"
            if len(prompt) >= self._max_length:
                way_out = "give a shorter prompt"
            limit = (
                "the model supports" if self._max_length == self.model.config.max_length else "the engine has room for"
            )
            raise ValueError(
                f"{name} has {len(prompt)} tokens, which with max_tokens={sampling.max_tokens} exceeds "
                f"the {self._max_length} tokens that {limit}; {way_out}"
            )

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request at once and frees their pages. The next `step` returns an Output of each that
        was not finished."""
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish(sequence, [], "", None, "cancelled", None)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self.scheduler.has_work or bool(self._outputs) or bool(self._calls)

    def step(self) -> list[Output]:
        """Starts the next call of the device, if there is work, and returns what the call before it generated."""
        while True:
            work = self.scheduler.next()
            if isinstance(work, Wait) and self._calls:
                self._read(self._calls.popleft())
            elif not isinstance(work, Wait):
                break
        if work is not None:
            self._calls.append(self._start_call(work))
        if self._calls and (work is None or len(self._calls) > 1):
            self._read(self._calls.popleft())
        outputs = self._outputs
        self._outputs = []
        return outputs

    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_used=self.pool.num_used,
            num_pages=self.pool.num_pages,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.num_preemptions,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    # ------------------------------------------------------------------ calls of the device

    def _start_call(self, work: Prefill | Decode) -> _Call:
        for sequence in {run.sequence: None for run in (work.chunks if isinstance(work, Prefill) else ())}:
            if sequence.request.sampling.has_adjusted_logits and sequence.num_pending:
                self._start_penalties(sequence)
        call = self._start_prefill(work) if isinstance(work, Prefill) else self._start_decode(work)
        for array in jax.tree.leaves((call.drawn, call.of_prompt)):
            array.copy_to_host_async()
        return call

    def _start_penalties(self, sequence: Sequence) -> None:
        counts_V = np.zeros(self._vocab_size, np.int32)
        prompt = sequence.request.prompt
        counts_V[[token for token in prompt if token < self._vocab_size]] = PROMPT_TOKEN
        np.add.at(counts_V, sequence.tokens[len(prompt) :], 1)
        bias_V = np.zeros(self._vocab_size, np.float32)
        for token, bias in sequence.request.sampling.logit_bias.items():
            bias_V[token] = bias
        with jax.set_mesh(self.mesh):
            self._rows = self._call(
                ("row",), self._start_row, self._rows, *self._put((np.int32(sequence.row), counts_V, bias_V))
            )

    def _start_decode(self, work: Decode) -> _Call:
        rows = [(run, offset) for run in work.runs for offset in range(1 + len(run.draft))]
        num_rows = _bucket(len(rows), self._row_buckets)
        num_pages = _bucket(max(len(run.sequence.pages) for run in work.runs), self._table_buckets)
        ints = np.zeros((3, num_rows), np.int32)
        table_BP = np.zeros((num_rows, num_pages), np.int32)
        for number, (run, offset) in enumerate(rows):
            sequence = run.sequence
            newest = sequence.tokens[run.start] if run.start < len(sequence.tokens) else -1
            token = run.draft[offset - 1] if offset else newest
            ints[:, number] = (token, run.start + offset, run.start + run.count)
            table_BP[number, : len(sequence.pages)] = sequence.pages
        chooser = self._chooser([run.sequence for run, _ in rows], num_rows)
        return self._run_decode(work, DecodeBatch(*ints, table_BP), chooser, work.num_steps)

    def _run_decode(self, work, batch: DecodeBatch, chooser: Chooser, num_steps: int) -> _Call:
        arguments = self._put((batch, chooser, np.int32(num_steps)))
        self._caches, self._rows, drawn = self._call(
            ("decode", *batch.table_BP.shape), self._decode, self.params, self._caches, self._rows, *arguments
        )
        return _Call(work, drawn, None)

    def _start_prefill(self, work: Prefill) -> _Call:
        num_tokens = sum(chunk.end - chunk.start for chunk in work.chunks)
        num_pages = sum(-(-chunk.end // self._sizes.page_size) for chunk in work.chunks)
        length = _bucket(num_tokens, self._chunk_buckets)
        batch = self._empty_prefill(length, _bucket(num_pages, self._prefill_tables(length)))
        last = [chunk for chunk in work.chunks if chunk.is_last]
        wants_prompt = False
        token = 0
        page = 0
        for chunk in work.chunks:
            here = slice(token, token + chunk.end - chunk.start)
            wants_prompt |= self._fill_chunk(batch, chunk, here, page)
            if chunk.is_last:
                batch.last_M[last.index(chunk)] = here.stop - 1
            token = here.stop
            page += -(-chunk.end // self._sizes.page_size)
            self._prompt_tokens += chunk.end - chunk.start
        chooser = self._chooser([chunk.sequence for chunk in last], self._num_chunks)
        return self._run_prefill(work, batch, chooser, wants_prompt)

    def _run_prefill(self, work, batch: PrefillBatch, chooser: Chooser, wants_prompt: bool) -> _Call:
        arguments = self._put((batch, chooser, np.bool_(wants_prompt)))
        key = ("prefill", len(batch.tokens_T), len(batch.table_P))
        self._caches, self._rows, drawn, of_prompt = self._call(
            key, self._prefill, self.params, self._caches, self._rows, *arguments
        )
        return _Call(work, drawn, of_prompt if wants_prompt else None)

    def _empty_prefill(self, length: int, num_pages: int) -> PrefillBatch:
        def full(value: int = 0) -> np.ndarray:
            return np.full(length, value, np.int32)

        no_slot = self._sizes.num_pages * self._sizes.page_size
        arrays = (full(), full(), full(no_slot), full(self._sizes.num_rows), full(), full(), full())
        return PrefillBatch(*arrays, np.zeros(num_pages, np.int32), np.zeros(self._num_chunks, np.int32))

    def _fill_chunk(self, batch: PrefillBatch, chunk, here: slice, first_page: int) -> bool:
        """-> whether the log-probabilities of these tokens are wanted."""
        sequence = chunk.sequence
        size = self._sizes.page_size
        num_pages = -(-chunk.end // size)
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        pages = np.array(sequence.pages[:num_pages], np.int32)
        batch.tokens_T[here] = sequence.tokens[chunk.start : chunk.end]
        batch.positions_T[here] = positions
        batch.slots_T[here] = pages[positions // size] * size + positions % size
        batch.rows_T[here] = sequence.row
        batch.lower_T[here] = first_page * size
        batch.upper_T[here] = first_page * size + positions + 1
        batch.table_P[first_page : first_page + num_pages] = pages
        following = sequence.tokens[chunk.start + 1 : chunk.end + 1]
        batch.targets_T[here.start : here.start + len(following)] = following
        return self._wants_prompt(sequence)

    def _wants_prompt(self, sequence: Sequence) -> bool:
        request = sequence.request
        return request.prompt_logprobs is not None and sequence.index == 0

    def _chooser(self, sequences: Items[Sequence], num_rows: int) -> Chooser:
        padding = num_rows - len(sequences)
        settings = [sequence.request.sampling for sequence in sequences] + [Sampling(temperature=0.0)] * padding
        indices = [sequence.index for sequence in sequences] + [0] * padding
        rows_B = np.array([sequence.row for sequence in sequences] + [self._sizes.num_rows] * padding, np.int32)
        sampling = RowSampling.of(settings, indices)
        mask_BW = np.zeros((num_rows, -(-self._vocab_size // 32)), np.uint32)
        has_mask_B = np.zeros(num_rows, bool)
        for number, sequence in enumerate(sequences):
            if sequence.matcher is not None:
                mask_BW[number] = sequence.matcher.mask()
                has_mask_B[number] = True
        if not has_mask_B.any():  # a large array, sent to the device once
            if num_rows not in self._no_mask:
                self._no_mask[num_rows] = self._put(mask_BW)
            mask_BW = self._no_mask[num_rows]
        return Chooser(rows_B, sampling, mask_BW, has_mask_B)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def _call(self, key: tuple, function, *arguments):
        """Runs a program, compiled once for each key."""
        with jax.set_mesh(self.mesh):
            if key not in self._programs:
                self._programs[key] = function.lower(*arguments).compile()
            return self._programs[key](*arguments)

    # ------------------------------------------------------------------ results

    def _read(self, call: _Call) -> None:
        """Waits for the results of a call and hands them to its sequences."""
        drawn = jax.tree.map(np.asarray, call.drawn)
        if isinstance(call.work, Decode):
            row = 0
            for run in call.work.runs:
                self._read_run(run, jax.tree.map(lambda a, row=row: a[:, row:], drawn))
                row += 1 + len(run.draft)
            return
        if call.of_prompt is not None:
            self._read_prompt(call.work, jax.tree.map(np.asarray, call.of_prompt))
        for number, chunk in enumerate(chunk for chunk in call.work.chunks if chunk.is_last):
            self._add(chunk.sequence, jax.tree.map(lambda a, n=number: a[n : n + 1], drawn))

    def _read_run(self, run: Run, drawn: Drawn) -> None:
        """drawn: [steps, rows]: the steps of its row, or with a draft one step of as many rows."""
        if not run.draft:
            return self._add(run.sequence, jax.tree.map(lambda a: a[: run.count, 0], drawn))
        drawn = jax.tree.map(lambda a: a[0, : run.count], drawn)
        pairs = zip(run.draft, drawn.tokens.tolist(), strict=False)
        accepted = next((number for number, (guess, token) in enumerate(pairs) if guess != token), len(run.draft))
        if run.sequence.is_finished:
            return
        self._drafted += len(run.draft)
        self._accepted += accepted
        run.sequence.num_pending -= len(run.draft) - accepted
        run.sequence.num_written -= len(run.draft) - accepted
        self._add(run.sequence, jax.tree.map(lambda a: a[: accepted + 1], drawn))

    def _read_prompt(self, work: Prefill, of_prompt) -> None:
        logprobs, ids, top = of_prompt
        token = 0
        for chunk in work.chunks:
            request = chunk.sequence.request
            if self._wants_prompt(chunk.sequence):
                following = request.prompt[len(request.prompt_logprobs) + 1 : chunk.end + 1]
                first = token + len(request.prompt_logprobs) - chunk.start
                for place, target in enumerate(following, first):
                    request.prompt_logprobs.append(
                        _token_logprobs(
                            target, logprobs[place], ids[place], top[place], request.sampling.prompt_logprobs
                        )
                    )
            token += chunk.end - chunk.start

    def _add(self, sequence: Sequence, drawn: Drawn) -> None:
        """New tokens of a sequence, as far as it goes."""
        if sequence.is_finished:
            return
        sampling = sequence.request.sampling
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        text = ""
        for step, token in enumerate(drawn.tokens.tolist()):
            sequence.num_pending -= 1
            if len(sequence.tokens) == sequence.limit:  # max_tokens is 0
                return self._finish(sequence, tokens, text, logprobs, "length", None)
            is_end = token in self._ends and not sampling.ignore_eos
            if is_end or token in sampling.stop_token_ids:
                return self._finish(sequence, tokens, text, logprobs, "stop", token)
            tokens.append(token)
            sequence.tokens.append(token)
            self._generated_tokens += 1
            if logprobs is not None:
                one = (a[step] for a in drawn.logprobs)
                logprobs.append(_token_logprobs(token, *one, sampling.logprobs))
            stream = self._texts.get(sequence)
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
        stream = self._texts.pop(sequence, None)
        if stream is not None and stream.stopped_by is None:
            text += stream.finish()
        self.scheduler.finish(sequence)
        arguments = (tokens, text, logprobs, finish_reason, stop_reason)
        self._outputs.append(Output(sequence.request, sequence.index, *arguments))

    # ------------------------------------------------------------------ programs

    def warm_up(self) -> None:
        """Compiles every program that a request can need, several at a time, and runs each once. Nothing compiles
        afterwards."""
        batches = [self._empty_decode(*shape) for shape in self._decode_shapes()]
        prompts = [self._empty_prefill(*shape) for shape in self._prefill_shapes()]
        nobody = {size: self._chooser([], size) for size in {*self._row_buckets, self._num_chunks}}

        def compile_decode(batch: DecodeBatch) -> None:
            arguments = self._put((batch, nobody[len(batch.positions_B)], np.int32(1)))
            self._compile(("decode", *batch.table_BP.shape), self._decode, *arguments)

        def compile_prefill(batch: PrefillBatch) -> None:
            arguments = self._put((batch, nobody[self._num_chunks], np.bool_(False)))
            self._compile(("prefill", len(batch.tokens_T), len(batch.table_P)), self._prefill, *arguments)

        with ThreadPoolExecutor(WARM_UP_THREADS) as threads:
            list(threads.map(lambda job: job[0](job[1]), [
                *((compile_decode, batch) for batch in batches), *((compile_prefill, batch) for batch in prompts)
            ]))  # fmt: skip
        for batch in batches:
            self._run_decode(None, batch, nobody[len(batch.positions_B)], 1)
        for batch in prompts:
            self._run_prefill(None, batch, nobody[self._num_chunks], False)
        row = self._put((np.int32(0), np.zeros(self._vocab_size, np.int32), np.zeros(self._vocab_size, np.float32)))
        self._rows = self._call(("row",), self._start_row, self._rows, *row)
        jax.block_until_ready(self._caches)

    def _compile(self, key: tuple, function, *arguments) -> None:
        with jax.set_mesh(self.mesh):
            if key in self._programs:
                return
            with LOWERING:
                lowered = function.lower(self.params, self._caches, self._rows, *arguments)
            self._programs[key] = lowered.compile()

    def _empty_decode(self, num_rows: int, num_pages: int) -> DecodeBatch:
        zeros = np.zeros(num_rows, np.int32)
        return DecodeBatch(zeros, zeros, zeros, np.zeros((num_rows, num_pages), np.int32))

    def _decode_shapes(self) -> list[tuple[int, int]]:
        return [(rows, pages) for rows in self._row_buckets for pages in self._table_buckets]

    def _prefill_shapes(self) -> list[tuple[int, int]]:
        return [(length, pages) for length in self._chunk_buckets for pages in self._prefill_tables(length)]

    def _chunk_pages(self, length: int) -> int:
        """Pages of `length` tokens of several sequences."""
        return -(-length // self._sizes.page_size) + self._num_chunks

    def _prefill_tables(self, length: int) -> list[int]:
        """Sizes of the table: without and with tokens before the chunks."""
        fresh = self._chunk_pages(length)
        most = self.scheduler.limits.chunk_pages
        if self._table_factor is None:
            return sorted({min(fresh, most), most})
        return _buckets(fresh, most, self._table_factor)

    # ------------------------------------------------------------------ memory

    def _shares_pages(self) -> bool:
        """Whether sequences can share pages: not if a layer has a state per sequence."""
        if not self.serving.prefix_cache:
            return False
        if self._has_states():
            logger.warning("prefix_cache: off, this model has layers with a state per sequence")
        return not self._has_states()

    def _has_states(self) -> bool:
        """Whether a layer has a state per sequence besides keys and values in pages."""
        one, two = (self._pool_bytes(self._sizes._replace(num_rows=rows)) for rows in (1, 2))
        return one != two

    def _pool_bytes(self, sizes: PoolSizes) -> int:
        abstract = jax.eval_shape(lambda: self.model.config.new_pages(sizes, self.model.execution))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))

    def _pool_sizes(self) -> PoolSizes:
        serving = self.serving
        dtype = jnp.dtype(PAGE_DTYPES.get(serving.page_dtype, self.model.precision.compute_dtype))
        sizes = PoolSizes(serving.num_pages or 1, serving.page_size, serving.max_rows, dtype)
        if serving.num_pages is not None:
            return sizes
        one, two = (self._pool_bytes(sizes._replace(num_pages=count)) for count in (1, 2))
        available = self._available_bytes() - (2 * one - two)
        most = serving.max_rows * -(-self._longest() // serving.page_size)
        num_pages = min(available // max(two - one, 1), most) if two > one else most
        if num_pages < 1:
            raise ValueError(
                f"memory_fraction={serving.memory_fraction} leaves no room for keys and values; use a larger fraction, "
                "or more devices (--mesh.tensor)"
            )
        return sizes._replace(num_pages=num_pages)

    @property
    def num_programs(self) -> int:
        """Compiled so far."""
        return len(self._programs)

    @property
    def bytes_per_token(self) -> float:
        """Of keys and values in all layers and on all devices."""
        one, two = (self._pool_bytes(self._sizes._replace(num_pages=count)) for count in (1, 2))
        return (two - one) / self._sizes.page_size

    def _longest(self) -> int:
        """Maximum tokens of a sequence, if the pages hold them."""
        supported = self.model.config.max_length
        wanted = self.serving.max_length or supported or DEFAULT_MAX_LENGTH
        return min(wanted, supported or wanted)

    def _available_bytes(self) -> int:
        """For pages, summed over the devices that split the heads."""
        device = self.mesh.local_devices[0]
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free = int(self.serving.memory_fraction * stats["bytes_limit"]) - stats["bytes_in_use"]
        else:
            free = HOST_POOL_BYTES // len(self.mesh.local_devices)
        return max(free, 0) * self.mesh.shape["tensor"]


def _cast(model: Model, params: dict) -> dict:
    dtypes = jax.tree.map(lambda a: a.dtype, serving_params(model))

    def cast(array, dtype):
        return jax.tree.map(lambda a: a.astype(dtype), array)

    return jax.tree.map(cast, params, dtypes, is_leaf=is_per_layer)


def _token_logprobs(token: int, logprob, ids, top, count: int) -> TokenLogprobs:
    pairs = zip(ids[:count].tolist(), top[:count].tolist(), strict=True)
    return TokenLogprobs(token, float(logprob), list(pairs))


def _buckets(smallest: int, largest: int, factor: int) -> list[int]:
    """smallest, smallest * factor, ..., largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]


def _bucket(count: int, buckets: Items[int]) -> int:
    """The smallest one that is large enough."""
    return next(size for size in buckets if size >= count)
