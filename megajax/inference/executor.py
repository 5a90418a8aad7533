"""The programs of an engine, compiled for a few shapes, and the arrays on the device that they update: caches and rows.

What they compute is in inference/programs.py.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.inference import programs
from megajax.inference.batches import Batches
from megajax.inference.programs import Chooser, DecodeBatch, Drawn, PrefillBatch, Rows
from megajax.inference.sampling import Logprobs
from megajax.layers.kv_cache import PoolSizes
from megajax.models.model import Model

WARM_UP_THREADS = 8  # each compiles a program
LOWERING = threading.Lock()  # two threads must not lower Pallas kernels at the same time (pallas_kernels/README.md)


class Executor:
    def __init__(self, model: Model, mesh: Mesh, sizes: PoolSizes, vocab_size: int, max_steps: int):
        """Allocates the pool. max_steps: decoding steps of a call."""
        self.mesh = mesh
        self.sizes = sizes
        self.vocab_size = vocab_size
        self.compiled: dict[tuple, Any] = {}
        """By kind and shape."""
        self._no_masks: dict[int, jax.Array] = {}
        self._replicated = NamedSharding(mesh, P())
        with jax.set_mesh(mesh):
            self.caches = jax.jit(functools.partial(model.config.new_pages, sizes, model.execution))()
            rows = functools.partial(Rows.zeros, sizes.num_rows, vocab_size)
            self._rows = jax.jit(rows, out_shardings=self._replicated)()
        state_shardings = (jax.tree.map(lambda a: a.sharding, self.caches), self._replicated)
        self._decode = jax.jit(
            functools.partial(programs.decode, model, vocab_size, sizes, max_steps),
            out_shardings=(*state_shardings, self._replicated),
            donate_argnums=(1, 2),
        )
        self._prefill = jax.jit(
            functools.partial(programs.prefill, model, vocab_size),
            out_shardings=(*state_shardings, self._replicated, self._replicated),
            donate_argnums=(1, 2),
        )
        self._start_row = jax.jit(Rows.start, donate_argnums=0, out_shardings=self._replicated)

    # ------------------------------------------------------------------ calls

    def decode(self, params: dict, batch: DecodeBatch, chooser: Chooser, num_steps: int) -> Drawn:
        """-> tokens [max_steps, B], of which the first num_steps count."""
        self.caches, self._rows, drawn = self._call(
            ("decode", *batch.table_BP.shape), self._decode, params, self.caches, self._rows,
            *self._put((batch, self._with_mask(chooser), np.int32(num_steps))),
        )  # fmt: skip
        return drawn

    def prefill(
        self, params: dict, batch: PrefillBatch, chooser: Chooser, wants_prompt: bool
    ) -> tuple[Drawn, Logprobs | None]:
        """-> (tokens [M], log-probabilities of the prompt tokens [T] if they are wanted)."""
        self.caches, self._rows, drawn, of_prompt = self._call(
            ("prefill", len(batch.tokens_T), len(batch.table_P)), self._prefill, params, self.caches, self._rows,
            *self._put((batch, self._with_mask(chooser), np.bool_(wants_prompt))),
        )  # fmt: skip
        return drawn, of_prompt if wants_prompt else None

    def start_row(self, row: int, counts_V: np.ndarray, bias_V: np.ndarray) -> None:
        """As Rows.start."""
        arrays = self._put((np.int32(row), counts_V, bias_V))
        self._rows = self._call(("row",), self._start_row, self._rows, *arrays)

    def _call(self, key: tuple, function, *arguments):
        """Runs a program, compiled once for each key."""
        with jax.set_mesh(self.mesh):
            if key not in self.compiled:
                self.compiled[key] = function.lower(*arguments).compile()
            return self.compiled[key](*arguments)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._replicated)

    def _with_mask(self, chooser: Chooser) -> Chooser:
        """A mask that allows everything is large, and goes to the device once."""
        if chooser.has_mask_B.any():
            return chooser
        size = len(chooser.has_mask_B)
        if size not in self._no_masks:
            self._no_masks[size] = self._put(chooser.mask_BW)
        return chooser._replace(mask_BW=self._no_masks[size])

    # ------------------------------------------------------------------ warm-up

    def warm_up(self, params: dict, batches: Batches) -> None:
        """Compiles the programs of all shapes, several at a time, and runs each once."""
        decodes = [batches.empty_decode(*shape) for shape in batches.shapes.decode()]
        prefills = [batches.empty_prefill(*shape) for shape in batches.shapes.prefill()]

        def compile_decode(batch: DecodeBatch, chooser: Chooser) -> None:
            self._compile(("decode", *batch.table_BP.shape), self._decode, params, batch, chooser, np.int32(1))

        def compile_prefill(batch: PrefillBatch, chooser: Chooser) -> None:
            key = ("prefill", len(batch.tokens_T), len(batch.table_P))
            self._compile(key, self._prefill, params, batch, chooser, np.bool_(False))

        with ThreadPoolExecutor(WARM_UP_THREADS) as threads:
            jobs = [threads.submit(compile_decode, *arrays) for arrays in decodes]
            jobs += [threads.submit(compile_prefill, *arrays) for arrays in prefills]
            for job in jobs:
                job.result()
        for arrays in decodes:
            self.decode(params, *arrays, 1)
        for arrays in prefills:
            self.prefill(params, *arrays, False)
        self.start_row(0, np.zeros(self.vocab_size, np.int32), np.zeros(self.vocab_size, np.float32))
        jax.block_until_ready(self.caches)

    def _compile(self, key: tuple, function, params: dict, batch, chooser: Chooser, last) -> None:
        with jax.set_mesh(self.mesh):
            if key in self.compiled:
                return
            arrays = self._put((batch, self._with_mask(chooser), last))
            with LOWERING:
                lowered = function.lower(params, self.caches, self._rows, *arrays)
            self.compiled[key] = lowered.compile()
