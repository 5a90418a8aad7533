"""The programs of an engine, compiled for a few shapes, and the arrays on the device that they update: caches and rows.

What they compute is in inference/device/programs.py.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.inference.device import programs
from megajax.inference.device.batches import Batches, Shapes
from megajax.inference.device.compiler_options import IN_GRAPHS, NVIDIA, decode_options, prefill_options
from megajax.inference.device.image_features import MIN_PATCHES, EncodeBatch, ImageFeatures
from megajax.inference.device.packing import num_words, packed, unpacked
from megajax.inference.device.programs import (
    Drawn,
    HostBeside,
    HostChooser,
    HostDecodeBatch,
    HostPrefillBatch,
    Rows,
)
from megajax.inference.device.warm_up import Compilation
from megajax.inference.tokens.sampling import Logprobs
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.mesh.current import exchanging
from megajax.mesh.lowering import LOWERING, Unlowered, lowering
from megajax.mesh.stored_programs import StoredPrograms
from megajax.models.model import Model
from megajax.ops.mailboxes import Mailboxes, once_all_are_ready
from megajax.ops.mailboxes import problem as mailboxes_problem

logger = logging.getLogger("megajax")

# Less than programs need for their temporary arrays: Llama-3 8B 7 MiB with 2 rows, 110 with 32 and 880 with 256.
SMALL_BYTES = 6 * 2**20
TIMED_STEPS = 4  # of a call; a single one may take less than the host needs to start a call
NO_MASK = np.zeros(0, np.uint32)  # in place of one that is sent apart


def _space_for_small_arrays(sharding: NamedSharding) -> jax.Array:
    """Frees memory for what calls get and return, in front of an array that must be kept.

    These arrays would otherwise take the first part of the memory that programs use for temporary arrays, and move
    those. Then each call writes new addresses into each kernel of its CUDA graph: with 500 of them 2 to 14 ms.
    """
    space, behind = (jax.device_put(np.zeros(SMALL_BYTES, np.uint8), sharding) for _ in range(2))
    jax.block_until_ready((space, behind))
    space.delete()
    return behind


def _wanted(drawn: Drawn, chooser: HostChooser) -> Drawn:
    """Without the log-probabilities if no row wants them: the host then reads one array instead of four."""
    return drawn if chooser.sampling.has_logprobs_B.any() else drawn._replace(logprobs=None)


def _encoded(model: Model, params: dict, patches: jax.Array, places: jax.Array, index_F: jax.Array) -> jax.Array:
    return model.module(params).encode_images({"patches": patches, "patch_places": places}, index_F[None])


def _decode(
    model: Model, vocab_size: int, sizes: PoolSizes, max_steps: int, like: tuple, params: dict, caches: dict,
    rows: Rows, words: jax.Array, mask: jax.Array
) -> tuple[dict, Rows, Drawn]:  # fmt: skip
    """As programs.decode. like: the shapes of the small arrays, which are packed in `words`."""
    batch, chooser, num_steps, mailboxes = unpacked(words, like)
    of = (model, vocab_size, sizes, max_steps)
    if mailboxes is not None:
        num_steps = once_all_are_ready(num_steps, mailboxes)
    arguments = (params, caches, rows, batch, chooser._replace(mask_BW=mask), num_steps, mailboxes)
    with exchanging(mailboxes):
        return programs.decode(*of, *arguments)


def _prefill(
    model: Model, vocab_size: int, sizes: PoolSizes, like: tuple, params: dict, caches: dict, rows: Rows,
    words: jax.Array, mask: jax.Array, mask_beside: jax.Array | None, features: jax.Array | None
) -> tuple[dict, Rows, tuple]:  # fmt: skip
    """As programs.prefill."""
    batch, chooser, beside, wants_prompt, mailboxes = unpacked(words, like)
    if mailboxes is not None:
        batch = batch._replace(tokens_T=once_all_are_ready(batch.tokens_T, mailboxes))
    if beside is not None:
        beside = beside._replace(chooser=beside.chooser._replace(mask_BW=mask_beside))
    arguments = (batch, chooser._replace(mask_BW=mask), beside, wants_prompt, features, mailboxes)
    with exchanging(mailboxes):
        caches, rows, *results = programs.prefill(model, vocab_size, sizes, params, caches, rows, *arguments)
    return caches, rows, tuple(results)


class CallSeconds(NamedTuple):
    """Of calls with one prompt and with sequences of one token, as measured."""

    steps: tuple[tuple[int, float], ...]
    """(rows, seconds) of decoding steps."""
    prefill: tuple[tuple[int, int, float], ...]
    """(prompt tokens, rows beside, seconds) of calls with prompts that decode as well."""


class Executor:
    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        sizes: PoolSizes,
        vocab_size: int,
        max_steps: int,
        kept: PoolSizes | None = None,
        features: ImageFeatures | None = None,
    ):
        """Allocates the pool. max_steps: decoding steps of a call. kept: of the states that the prefix cache keeps, if
        there are any. features: of a model that reads images."""
        self._model = model
        self.mesh = mesh
        self.sizes = sizes
        self.vocab_size = vocab_size
        self._max_steps = max_steps
        self.compiled: dict[tuple, Any] = {}
        """By function and shapes."""
        self._no_masks: dict[int, jax.Array] = {}
        self._replicated = NamedSharding(mesh, P())
        of_model = (model.config, model.precision, model.execution, model.transforms, model.stages)
        self.stored = StoredPrograms(mesh, (of_model, sizes, vocab_size, max_steps))
        with jax.set_mesh(mesh):
            self.caches = jax.jit(functools.partial(model.config.new_pages, sizes, model.execution))()
            self._kept: list[jax.Array] = []
            if kept is not None and kept.num_rows:
                leaves = jax.tree.leaves(jax.jit(functools.partial(model.config.new_pages, kept, model.execution))())
                self._is_state = [leaf.size > 0 for leaf in leaves]  # pages are empty there
                self._kept = [leaf for leaf in leaves if leaf.size]
            self._features = None
            self._image_shapes = [] if features is None else features.shapes()
            if features is not None:
                of_one = features.empty(1, MIN_PATCHES)
                abstract = jax.eval_shape(functools.partial(_encoded, model), model.abstract_weights, *of_one)
                shape = (features.num_slots, *abstract.shape[2:])
                zeros = functools.partial(jax.numpy.zeros, shape, model.precision.compute_dtype)
                self._features = jax.jit(zeros, out_shardings=self._replicated)()
            rows = functools.partial(Rows.zeros, sizes.num_rows, vocab_size)
            self._rows = jax.jit(rows, out_shardings=self._replicated)()
        self._mailboxes = None
        if mesh.size > 1 and NVIDIA in mesh.devices.flat[0].device_kind:
            why = mailboxes_problem(mesh, model.precision.compute_dtype)
            if why:
                logger.info("calls are not CUDA graphs: %s", why)
            else:
                self._mailboxes = Mailboxes(mesh)
        self._behind_space = _space_for_small_arrays(self._replicated) if self.asks_for_graphs else None
        kept_shardings = [a.sharding for a in self._kept]
        self._keep = jax.jit(programs.copy_state, donate_argnums=0, out_shardings=kept_shardings)
        self._restore = jax.jit(programs.copy_state, donate_argnums=0, out_shardings=kept_shardings)
        self._encode_images = jax.jit(
            functools.partial(programs.encode_images, model), donate_argnums=1, out_shardings=self._replicated
        )
        self._start_row = jax.jit(Rows.start, donate_argnums=0, out_shardings=self._replicated)

    # ------------------------------------------------------------------ calls

    def decode(self, params: dict, batch: HostDecodeBatch, chooser: HostChooser, num_steps: int) -> Drawn:
        """-> tokens [max_steps, B], of which the first num_steps count."""
        self.caches, self._rows, drawn = self._call(*self._decode_arguments(params, batch, chooser, num_steps))
        return _wanted(drawn, chooser)

    def prefill(
        self, params: dict, batch: HostPrefillBatch, chooser: HostChooser, beside: HostBeside | None, wants_prompt: bool
    ) -> tuple[Drawn, Logprobs | None, Drawn | None]:
        """-> (tokens [M], log-probabilities of the prompt tokens [T] if they are wanted, tokens [1, B] of beside)."""
        arguments = self._prefill_arguments(params, batch, chooser, beside, wants_prompt)
        self.caches, self._rows, (drawn, of_prompt, of_beside) = self._call(*arguments)
        if beside is not None:
            of_beside = _wanted(of_beside, beside.chooser)
        return _wanted(drawn, chooser), of_prompt if wants_prompt else None, of_beside

    def encode_images(self, params: dict, batch: EncodeBatch) -> None:
        """Writes the features of some views into their slots."""
        arguments = (params, self._features, *batch)
        self._features = self._plain_program(self._encode_images, arguments)(*arguments)

    def start_row(self, row: int, counts_V: np.ndarray, bias_V: np.ndarray) -> None:
        """As Rows.start."""
        arguments = (self._rows, np.int32(row), counts_V, bias_V)
        self._rows = self._plain_program(self._start_row, arguments)(*arguments)

    def keep(self, row: int, slot: int) -> None:
        """Copies the state of the sequence in a row to a slot of the kept states."""
        arguments = (self._kept, self._states(), np.int32(slot), np.int32(row))
        self._kept = self._plain_program(self._keep, arguments)(*arguments)

    def restore(self, row: int, slot: int) -> None:
        """Copies a kept state to a row."""
        arguments = (self._states(), self._kept, np.int32(row), np.int32(slot))
        states = iter(self._plain_program(self._restore, arguments)(*arguments))
        leaves, structure = jax.tree.flatten(self.caches)
        leaves = [next(states) if is_state else leaf for leaf, is_state in zip(leaves, self._is_state, strict=True)]
        self.caches = jax.tree.unflatten(structure, leaves)

    def _states(self) -> list[jax.Array]:
        """The arrays of the caches that have a row per sequence, instead of pages."""
        leaves = jax.tree.leaves(self.caches)
        return [leaf for leaf, is_state in zip(leaves, self._is_state, strict=True) if is_state]

    # NumPy arrays are arguments as they are: the call sends them to the devices in a fraction of the time that
    # device_put takes.

    def _call(self, name: str, params: dict, host: tuple, on_device: tuple) -> tuple:
        """name: decode or prefill. host: a tree of small arrays. on_device: arrays that may be there."""
        program = self._program(name, params, host, on_device)
        self.stored.note_call()
        return program(params, self.caches, self._rows, packed(host), *on_device)

    def _decode_arguments(
        self, params: dict, batch: HostDecodeBatch, chooser: HostChooser, num_steps: int
    ) -> tuple[str, dict, tuple, tuple]:
        addresses = None if self._mailboxes is None else self._mailboxes.addresses
        host = (batch, chooser._replace(mask_BW=NO_MASK), np.int32(num_steps), addresses)
        return "decode", params, host, (self._mask(chooser),)

    def _prefill_arguments(
        self, params: dict, batch: HostPrefillBatch, chooser: HostChooser, beside: HostBeside | None, wants_prompt: bool
    ) -> tuple[str, dict, tuple, tuple]:
        masks = (self._mask(chooser), beside and self._mask(beside.chooser))
        without = beside and beside._replace(chooser=beside.chooser._replace(mask_BW=NO_MASK))
        addresses = None if self._mailboxes is None else self._mailboxes.addresses
        host = (batch, chooser._replace(mask_BW=NO_MASK), without, np.bool_(wants_prompt), addresses)
        return "prefill", params, host, (*masks, self._features)

    def _mask(self, chooser: HostChooser) -> jax.Array | np.ndarray:
        """One that allows everything is large, and goes to the device once."""
        if chooser.has_mask_B.any():
            return chooser.mask_BW
        size = len(chooser.has_mask_B)
        if size not in self._no_masks:
            self._no_masks[size] = jax.device_put(chooser.mask_BW, self._replicated)
        return self._no_masks[size]

    def _program(self, name: str, params: dict, host: tuple, on_device: tuple):
        """The compiled program `name` for arrays of these shapes."""
        key = (name, *(a.shape for a in jax.tree.leaves((host, on_device))))
        if key not in self.compiled:
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), host)
            words = jax.ShapeDtypeStruct((num_words(like),), np.uint32, sharding=self._replicated)
            of = (self._model, self.vocab_size, self.sizes)
            batch, *_, addresses = host
            has_mailboxes = addresses is not None
            if name == "decode":
                function = functools.partial(_decode, *of, self._max_steps, like)
                num_rows = len(batch.positions_B)
                options = decode_options(self._model, params, self.mesh, num_rows, has_mailboxes=has_mailboxes)
            else:
                function = functools.partial(_prefill, *of, like)
                options = prefill_options(params, self.mesh, len(batch.tokens_T), has_mailboxes=has_mailboxes)
            arguments = self._abstract((params, self.caches, self._rows, words, *on_device))
            shardings = (jax.tree.map(lambda a: a.sharding, self.caches), self._replicated, self._replicated)
            program = Unlowered(function, arguments, self.mesh, donated=(1, 2), out_shardings=shardings)

            def compiled():
                return lowering.lower(program).compile(compiler_options={**options})

            described = (name, self._abstract((params, on_device)), like, options)
            self.compiled[key] = self.stored.get(described, compiled)
        return self.compiled[key]

    def _plain_program(self, function, arguments: tuple):
        """The compiled program for arguments of these shapes; those of the first two follow from the others."""
        key = (function, *(a.shape for a in jax.tree.leaves(arguments[2:])))
        if key not in self.compiled:
            with jax.set_mesh(self.mesh), LOWERING:
                lowered = function.lower(*self._abstract(arguments))
            self.compiled[key] = lowered.compile()
        return self.compiled[key]

    def _abstract(self, arguments: Any) -> Any:
        def abstract(a):
            sharding = self._replicated if isinstance(a, np.ndarray | np.generic) else a.sharding
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(abstract, arguments)

    # ------------------------------------------------------------------ warm-up

    @functools.cached_property
    def asks_for_graphs(self) -> bool:
        """Whether XLA is asked to make decoding programs CUDA graphs."""
        return IN_GRAPHS in decode_options(self._model, {}, self.mesh, 1, has_mailboxes=self._mailboxes is not None)

    def compilations(self, params: dict, batches: Batches, shapes: Shapes) -> dict[tuple, Compilation]:
        """By function and shape: each compiles a program, unless that has been done. They keep no arrays."""
        found: dict[tuple, Compilation] = {}
        # What takes longest comes first, so that the last ones are soon done: XLA tunes the products of few rows.
        for shape in shapes.decode:
            name, *arguments = self._decode_arguments(params, *batches.empty_decode(*shape), 1)
            found[name, *shape] = functools.partial(self._program, name, *self._abstract(arguments))
        for shape in reversed(shapes.prefill):
            name, *arguments = self._prefill_arguments(params, *batches.empty_prefill(*shape), False)
            found[name, *shape] = functools.partial(self._program, name, *self._abstract(arguments))
        for shape in self._image_shapes:
            images = self._abstract((params, self._features, *batches.empty_images(*shape)))
            found["images", *shape] = functools.partial(self._plain_program, self._encode_images, images)
        return found

    def run_once(self, params: dict, batches: Batches, shapes: Shapes) -> CallSeconds:
        """Runs the programs of these shapes, and those that do not depend on them; compiles what is missing."""
        num_steps = min(TIMED_STEPS, self._max_steps, self.sizes.page_size)
        steps = []
        for rows, pages in shapes.decode:
            one, several = (
                functools.partial(self.decode, params, *batches.full_decode(rows, pages, count), count)
                for count in (1, num_steps)
            )
            _make_graph(one)
            steps.append((rows, _period(several, max(4 // num_steps, 2)) / num_steps))
        prefill = []
        for shape in shapes.prefill:
            call = functools.partial(self.prefill, params, *batches.full_prefill(*shape), False)
            if shape.rows_beside:
                _make_graph(call)
                prefill.append((shape.tokens, shape.rows_beside, _period(call, 2)))  # up to a second each
            else:
                call()
        for shape in self._image_shapes:
            self.encode_images(params, batches.empty_images(*shape))
        self.start_row(0, np.zeros(self.vocab_size, np.int32), np.zeros(self.vocab_size, np.float32))
        if self._kept:
            self.keep(0, 0)
            self.restore(0, 0)
        jax.block_until_ready(self.caches)
        return CallSeconds(tuple(dict(steps).items()), tuple(prefill))


def _make_graph(call: Callable) -> None:
    """The first two calls of a program also make its CUDA graph: 23 and 31 ms instead of 7 and 11 (one H100)."""
    for _ in range(2):
        jax.block_until_ready(call())


def _period(call: Callable, count: int) -> float:
    """Seconds from one call to the next, in sequence, so without what the host does while the device computes."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(count)])
    return (time.perf_counter() - start) / count
