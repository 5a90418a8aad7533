"""Generates text with a model: many requests at once, which come and go (continuous batching).

Texts and images become prompts (inference/prompts.py), keys and values are in pages (inference/scheduling/pages.py).
The scheduler decides what a call of the device computes (inference/scheduling/scheduler.py), the executor runs it
(inference/device/executor.py), and its results become outputs (inference/results.py). One thread owns an engine: it
submits requests and calls `step` until there is no work.
"""

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.config import ServingConfig
from megajax.inference.device.batches import Batches, Shapes
from megajax.inference.device.executor import Executor
from megajax.inference.device.image_features import ImageFeatures
from megajax.inference.device.memory import (
    bytes_per_page,
    check_programs,
    kept_sizes,
    longest_sequence,
    pool_sizes,
    visible_tokens,
)
from megajax.inference.device.programs import Drawn
from megajax.inference.device.warm_up import Stage, staged
from megajax.inference.device.weights import joined_layers, serving_weights
from megajax.inference.draft import DraftModel, check_draft, check_guesses, check_same_tokens, check_states
from megajax.inference.load import OpenedModel, open_model
from megajax.inference.prompts import Prompts
from megajax.inference.results import Output, Results, Stats
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.scheduling.pages import KeptStates, PagePool
from megajax.inference.scheduling.scheduler import Limits, Scheduler
from megajax.inference.scheduling.waiting import Owner
from megajax.inference.scheduling.work import (
    Decode,
    Prefill,
    Request,
    Sequence,
    Wait,
    guessed_before,
    look_up,
)
from megajax.inference.tokens.sampling import Logprobs, Sampling
from megajax.layers.lora import AdapterChoice
from megajax.mesh.config import MeshConfig
from megajax.mesh.lowering import lowering
from megajax.models.model import Model
from megajax.parallel.encode import num_parts
from megajax.weights.sources import Source

logger = logging.getLogger("megajax")


class _Call(NamedTuple):
    """A call of the device whose results the host has not read yet."""

    work: Prefill | Decode
    drawn: Drawn
    of_prompt: Logprobs | None = None
    of_beside: Drawn | None = None

    def on_host(self) -> "_Call":
        """Waits for the results."""
        return _Call(self.work, *jax.tree.map(np.asarray, self[1:]))


class Engine:
    def __init__(
        self, model: Model, params: dict, mesh: Mesh, tokenizer: Tokenizer | None, *, start_ids: Items[int] = (),
        serving: ServingConfig = ServingConfig(), draft: tuple[Model, dict] | None = None,
        trained_length: int | None = None
    ):  # fmt: skip
        """params: sharded over `mesh`, stacked or per layer; matrices are cast or quantised as `serving` says.
        tokenizer: may be None if only tokens go in and out; there is then no end-of-document token. start_ids: tokens
        before each text prompt. draft: a smaller model with the same tokens, and its parameters, to guess
        serving.draft_tokens tokens (inference/draft.py); None: they are guessed by serving.draft_method.

        trained_length: tokens of the sequences that the model was trained on; longer ones are warned of, once.

        Raises ValueError for invalid serving settings, a model that does not continue text or lacks the layers of
        draft_method, and if the memory holds no page.
        """
        model.config.check_generates()
        serving.check()
        check_guesses(model, serving)
        self.model = model
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.serving = serving.on(self.platform)
        self.use(params)
        config = model.config
        self._vocab_size = min(config.vocab_size, tokenizer.vocab_size) if tokenizer else config.vocab_size
        self._allocate(draft)
        limits = self.scheduler.limits
        self.prompts = Prompts(
            config,
            tokenizer,
            start_ids,
            vocab_size=self._vocab_size,
            max_length=self._max_length,
            adapters=self.adapters,
            most_results=serving.image_tokens,
            most_image_tokens=limits.chunks[-1] if limits.whole_images else None,
            trained_length=trained_length,
        )
        self._calls: deque[_Call] = deque()
        self._end_of_step = 0.0
        self.results = Results(self.scheduler, tokenizer)
        self._prompt_tokens = 0

    def _allocate(self, draft: tuple[Model, dict] | None) -> None:
        """The pools, and what decides about them."""
        serving = self.serving
        models = [self.model] if draft is None else [self.model, draft[0]]
        sizes, *draft_sizes = pool_sizes(models, self.mesh, serving)
        self._sizes = sizes
        check_draft(models, serving, self._vocab_size)
        check_states(models, [sizes, *draft_sizes], serving)
        self._max_length = min(longest_sequence(models, serving), sizes.num_slots)
        has_kernel = self.platform == "gpu"
        # Guesses are checked by calls of their own.
        mixes = has_kernel and not serving.draft_tokens
        shapes = Shapes.of(sizes, self._max_length, serving.max_batch_tokens, has_kernel, mixes=mixes)
        reads = self.model.config.image_inputs
        self.features = None
        if reads is not None:
            self.features = ImageFeatures(reads, serving.image_tokens, num_parts(dict(self.mesh.shape)))
        inputs = self.model.config.inputs(1, packed=False)
        self.batches = Batches(sizes, shapes, self._vocab_size, inputs, self.features, self.adapters)
        self.pool = PagePool(sizes.num_pages, sizes.page_size, caches_prefixes=serving.prefix_cache)
        limits = Limits(
            shapes.rows[-1],
            shapes.chunks,
            shapes.num_chunks,
            shapes.most_pages,
            serving.decode_steps,
            serving.draft_tokens,
            visible_tokens(models, [sizes, *draft_sizes]),
            whole_images="block_ids" in inputs,
            image_tokens=None if reads is None else serving.image_tokens,
            rows_beside=shapes.rows_beside,
        )
        kept = kept_sizes(self.model, sizes, serving)
        parts = (self.model, self.mesh, sizes, self._vocab_size, serving.decode_steps, kept, self.features)
        self.executor = Executor(*parts)
        self.draft = None
        guess = guessed_before if serving.num_guesses else look_up
        if draft is not None:
            params = serving_weights(*draft, "auto", self.mesh)
            self.draft = DraftModel(draft[0], params, self.mesh, draft_sizes[0], self.batches, serving.draft_tokens)
            guess = self.draft.guess
        states = KeptStates(kept.num_rows) if kept.num_rows else None
        self.scheduler = Scheduler(self.pool, limits, guess, states, has_draft_model=draft is not None)

    @property
    def platform(self) -> str:
        """Of its devices: cpu or gpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that a request can choose."""
        choices = [transform for transform in self.model.adapters if isinstance(transform, AdapterChoice)]
        return choices[0].names if choices else ()

    def use(self, params: dict) -> None:
        """Generates with these parameters, stacked or per layer, from here on; no program is compiled again.

        Forgets the prefix cache. Requests that run continue with the keys and values of the old parameters. Raises
        ValueError for parameters that are quantised in another way.
        """
        new = serving_weights(self.model, params, self.serving.weight_dtype, self.mesh)
        if getattr(self, "params", None):
            self.check_formats(new)
        self.params = new
        if hasattr(self, "scheduler"):
            self.scheduler.forget()
            if self.features is not None:
                self.features.forget()

    def check_formats(self, params: dict) -> None:
        """Raises ValueError for parameters, or abstract ones, that are quantised in another way than those in use."""
        joined = jax.eval_shape(functools.partial(joined_layers, self.model), params)
        if _formats(joined) != _formats(self.params):
            raise ValueError(
                f"weight_dtype={self.serving.weight_dtype}: the new parameters are quantised in another way than those "
                "that the engine was made with; make a new engine"
            )

    def check(self, source: Source) -> None:
        """Reads all weights of the source and keeps none; any thread may call this. Raises ValueError if they are
        damaged or not finite, of another model, or quantised in another way than those in use."""
        self.check_formats(self._opened(source).check())

    def load(self, source: Source) -> None:
        """Like `use`, with the weights of a source that `check` has accepted.

        They take the place of those in use array by array, so both are never in memory together: if reading fails here,
        the engine has no weights left.
        """
        opened = self._opened(source)
        old = self.params
        self.params = {}
        self.use(opened.restore(replaced=old, joins=True))

    def _opened(self, source: Source) -> OpenedModel:
        config = source.config
        if (config.model, config.lora.transforms) != (self.model.config, self.model.adapters):
            raise ValueError(f"run={source} is another model than the one that is served; start a server for it")
        parts = (source, self.model, self.mesh, self.prompts.tokenizer)
        return OpenedModel(*parts, start_ids=(), weights=self.serving.weight_dtype)

    @staticmethod
    def from_run(
        run_dir: str | Path,
        mesh: MeshConfig | None = None,
        step: int | None = None,
        serving: ServingConfig = ServingConfig(),
        draft_run: str | Path | None = None,
        devices: Items[jax.Device] | None = None,
        adapters: Mapping[str, str | Path] = {},
    ) -> "Engine":
        """The model of a run directory, with the parameters of one step (default: the newest), or of a Hugging Face
        folder, on any mesh.

        mesh: default one device; a smaller mesh takes the first of the devices, default all of the machine. draft_run:
        run directory or Hugging Face folder of a smaller model for speculative decoding. adapters: {name: directory}
        of runs that trained adapters of this model (lora.rank) and of folders of PEFT, each for the requests that name
        it (Sampling.adapter). Raises ValueError if the directory holds no run, no checkpoint or not that step, if the
        step or the tokenizer is damaged or does not belong to the run, for what is no adapter of the model, if the mesh
        does not divide the model, or if the draft model has another tokenizer.
        """
        serving.check()
        opened = open_model(run_dir, mesh, step, weights=serving.weight_dtype, devices=devices, adapters=adapters)
        opened.model.config.check_generates()
        params = opened.restore(joins=True)
        draft = None
        if draft_run is not None:
            small = open_model(draft_run, mesh, devices=devices)
            check_same_tokens(draft_run, small.tokenizer, opened.tokenizer)
            draft = (small.model, small.restore(joins=True))
        parts = (opened.model, params, opened.mesh, opened.tokenizer)
        length = opened.source.config.training.sequence_length
        return Engine(*parts, start_ids=opened.start_ids, serving=serving, draft=draft, trained_length=length)

    # ------------------------------------------------------------------ whole generations

    def generate(self, prompts: Items[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt, up to the end of the document, a stop text or max_tokens.

        An empty prompt starts a new document. Raises ValueError for invalid sampling settings and for a prompt that is
        too long.
        """
        found = self._generate([self.prompts.encode(prompt) for prompt in prompts], sampling)
        return ["".join(output.text for output in outputs) for outputs in found]

    def generate_tokens(self, prompts: Items[Items[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens that follow each prompt, without the token that ends it, but with a stop text."""
        found = self._generate(prompts, sampling)
        return [[token for output in outputs for token in output.tokens] for outputs in found]

    def _generate(self, prompts: Items[Items[int]], sampling: Sampling) -> list[list[Output]]:
        """All prompts are checked before the first one is queued."""
        if sampling.n > 1:
            raise ValueError(f"n={sampling.n}: generate gives one text per prompt; use submit for several")
        for number, prompt in enumerate(prompts):
            self.prompts.check(prompt, sampling, f"prompt {number}")
        found: list[list[Output]] = [[] for _ in prompts]
        for number, output in outputs_of(self, [(prompt, sampling) for prompt in prompts]):
            found[number].append(output)
        return found

    # ------------------------------------------------------------------ requests

    def submit(
        self, prompt: Items[int], sampling: Sampling, owner: Owner = Owner(), images: Items[PromptImage] = ()
    ) -> Request:
        """Queues a prompt, int tokens. owner: those who wait take turns. images: `read_image` of the images for which
        tokens stand in the prompt. Raises ValueError for invalid settings, and for a prompt that does not fit."""
        self.prompts.check(prompt, sampling)
        tokens = list(prompt)
        of_images = None
        if images:
            tokens, of_images = self.prompts.with_images(prompt, images, sampling)
        request = Request(tokens, sampling, owner=owner)
        limit = len(tokens) + sampling.max_tokens
        self.prompts.warn_beyond_training(limit)
        request.sequences = [
            Sequence(request, index, list(tokens), limit, images=of_images) for index in range(sampling.n)
        ]
        if sampling.prompt_logprobs is not None:
            request.prompt_logprobs = []
        for sequence in request.sequences:
            sequence.matcher = self.prompts.grammars.start(sampling)
            self.results.start(sequence)
        self.scheduler.waiting += request.sequences
        return request

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request at once and frees their pages. The next `step` returns an Output of each that
        was not finished."""
        for sequence in request.sequences:
            self.results.cancel(sequence)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self.scheduler.has_work or self.results.has_outputs or bool(self._calls)

    def step(self) -> list[Output]:
        """Starts the next call of the device, if there is work, and returns what the call before it generated."""
        # What the caller does between two steps counts too.
        begin = self._end_of_step if self._calls else time.perf_counter()
        waited = 0.0
        while True:
            work = self.scheduler.next()
            if isinstance(work, Wait) and self._calls:
                waited += self._read()
            elif not isinstance(work, Wait):
                break
        if work is not None:
            self._calls.append(self._start_call(work))
        if self._calls and (work is None or len(self._calls) > 1):
            waited += self._read()
        self._end_of_step = time.perf_counter()
        # Without a graph, starting a call takes as long as its steps.
        if isinstance(work, Decode) and self.executor.asks_for_graphs:
            self.scheduler.host_took(self._end_of_step - begin - waited)
        return self.results.take()

    def _read(self) -> float:
        """The results of the oldest call -> seconds of waiting for them."""
        begin = time.perf_counter()
        call = self._calls.popleft().on_host()
        seconds = time.perf_counter() - begin
        self.results.read(*call)
        return seconds

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
            generated_tokens=self.results.num_generated,
            preemptions=scheduler.num_preemptions,
            drafted=self.results.num_drafted,
            accepted=self.results.num_accepted,
        )

    # ------------------------------------------------------------------ calls of the device

    def _start_call(self, work: Prefill | Decode) -> _Call:
        call = self._start_prefill(work) if isinstance(work, Prefill) else self._start_decode(work)
        for array in jax.tree.leaves((call.drawn, call.of_prompt, call.of_beside)):
            array.copy_to_host_async()
        return call

    def _start_decode(self, work: Decode) -> _Call:
        drawn = self.executor.decode(self.params, *self.batches.decode(work), work.num_steps)
        return _Call(work, drawn)

    def _start_prefill(self, work: Prefill) -> _Call:
        for chunk in work.chunks:
            self._prompt_tokens += chunk.end - chunk.start
            if chunk.is_last and chunk.sequence.request.sampling.has_adjusted_logits:
                self.executor.start_row(chunk.sequence.row, *self.batches.penalties(chunk.sequence))
        wants_prompt = any(chunk.sequence.wants_prompt_logprobs for chunk in work.chunks)
        if self.features is not None:
            found = [
                chunk.sequence.images.within(chunk.start, chunk.end) for chunk in work.chunks if chunk.sequence.images
            ]
            for batch in self.features.encode([image for images in found for image in images]):
                self.executor.encode_images(self.params, batch)
        arrays = self.batches.prefill(work)
        if self.draft is not None:
            self.draft.read(*arrays)
        for copy in work.restored:
            self.executor.restore(*copy)
        call = _Call(work, *self.executor.prefill(self.params, *arrays, wants_prompt))
        for copy in work.kept:
            self.executor.keep(*copy)
        return call

    # ------------------------------------------------------------------ warm-up

    def warm_up(self) -> None:
        """Compiles every program that a request can need, several at a time, and runs each once, so no request may run.
        Nothing compiles afterwards. Forgets the prefix cache."""
        self._warm_up([self.batches.shapes])

    def warm_up_first(self) -> list[Stage]:
        """As `warm_up`, on a CPU only with the programs that suffice to serve any request, if slowly -> what remains.

        Any thread may compile a stage while this engine works; when it is done, call `use_shapes`, between two steps.
        On a GPU nothing remains: compiling measures kernels there, so what runs at the same time would slow them down,
        and they it. Nor does anything for a model that has to compute an image in one call.
        """
        shapes = self.batches.shapes
        is_staged = self.platform == "cpu" and not self.scheduler.limits.whole_images
        return self._warm_up(shapes.stages() if is_staged else [shapes])

    def use_shapes(self, shapes: Shapes) -> None:
        """The next calls have only these shapes; not fewer than calls under way have."""
        self.batches.shapes = shapes
        limits = self.scheduler.limits
        of_shapes = dict(num_rows=shapes.rows[-1], chunks=shapes.chunks, chunk_pages=shapes.most_pages)
        self.scheduler.use(limits._replace(**of_shapes))

    def _warm_up(self, shapes: Items[Shapes]) -> list[Stage]:
        if self.has_work:
            raise RuntimeError("requests are running, and warming up would overwrite their pages; warm up before them")
        self.scheduler.forget()
        executors = [(self.executor, self.params)]
        if self.draft is not None:
            executors.append((self.draft.executor, self.draft.params))
        compilations = [
            [executor.compilations(params, self.batches, each) for executor, params in executors] for each in shapes
        ]
        first, *rest = staged(shapes, compilations)
        how = f", {len(first.compilations)} of them first" if rest else ""
        if self.executor.asks_for_graphs:
            how += ", and XLA is asked to make those for decoding CUDA graphs"
        logger.info("compiling %d programs%s", sum(len(stage.compilations) for stage in [first, *rest]), how)
        # Those of a CPU are small, and leave no processor idle.
        with lowering.processes() if self.platform == "gpu" else contextlib.nullcontext():
            first.compile()
        if found := sum(executor.stored.num_found for executor, _ in executors):
            logger.info("%d of them were compiled by an earlier start, whose log names their kernels", found)
        for executor, _ in executors:
            check_programs(self.mesh, executor.compiled.values(), self.serving)
        seconds, *_ = [executor.run_once(params, self.batches, first.shapes) for executor, params in executors]
        limits = self.scheduler.limits
        self.scheduler.limits = limits._replace(step_seconds=seconds.steps, prefill_seconds=seconds.prefill)
        self.use_shapes(first.shapes)
        return rest

    @property
    def num_programs(self) -> int:
        """Compiled so far."""
        return len(self.executor.compiled) + (len(self.draft.executor.compiled) if self.draft else 0)

    @property
    def bytes_per_token(self) -> float:
        """Of the model's keys and values in all layers and on all devices."""
        return bytes_per_page(self.model, self._sizes) / self._sizes.page_size


def outputs_of(
    engine: Engine, prompts: Items[tuple[Items[int], Sampling]], images: Items[PromptImage] = ()
) -> Iterator[tuple[int, Output]]:
    """(number of a prompt, what is new) until all have finished. Leaving it cancels what has not. images: of each
    prompt, the same."""
    numbers = {
        engine.submit(prompt, sampling, images=images): number for number, (prompt, sampling) in enumerate(prompts)
    }
    try:
        unfinished = sum(sampling.n for _, sampling in prompts)
        while unfinished and engine.has_work:
            for output in engine.step():
                if output.request in numbers:
                    unfinished -= output.finish_reason is not None
                    yield numbers[output.request], output
    finally:
        for request in numbers:
            engine.cancel(request)


def _formats(params: dict) -> tuple:
    """What programs that read the parameters are compiled for."""
    return jax.tree.structure(params), [leaf.dtype for leaf in jax.tree.leaves(params)]
