"""Building the indices of a run: python -m benchmarks.data.indices [--documents=10000000] [--epochs=1]

Compares megajax (numpy) with Megatron-LM's published algorithm (megatron/core/datasets/helpers.cpp: one pass over the
documents, one over the samples of a blend), which this file reimplements in C++ and compiles with g++ -O3. Both start
from the same shuffled documents and have to agree. Prints seconds, and the peak bytes of arrays, including the results
but not the lengths of the documents.
"""

import ctypes
import subprocess
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.command_line import only, run
from megajax.data.blend import blending_indices
from megajax.data.samples.gpt import build_indices
from megajax.training.reporting.console import format_bytes

SEQUENCE_LENGTH = 4096
SEED = 0
MEAN_TOKENS = 500
BLEND_WEIGHTS = (0.5, 0.3, 0.15, 0.05)
SOURCE = r"""
#include <cstdint>
#include <algorithm>
extern "C" void sample_index(
    const int32_t* length, const int32_t* order, int64_t samples, int32_t tokens, int64_t* out) {
  int64_t place = 0, offset = 0;
  out[0] = out[1] = 0;
  for (int64_t n = 1; n <= samples; ++n) {
    int64_t left = tokens + 1;
    while (left) {
      int64_t here = length[order[place]] - offset;
      left -= here;
      if (left <= 0) { offset += left + here - 1; left = 0; } else { ++place; offset = 0; }
    }
    out[2 * n] = place; out[2 * n + 1] = offset;
  }
}
extern "C" void blend(const double* weight, int32_t sets, int64_t size, int16_t* set, int64_t* sample) {
  int64_t* taken = new int64_t[sets]();
  for (int64_t i = 0; i < size; ++i) {
    double most = weight[0] * std::max<double>(i, 1) - taken[0]; int32_t best = 0;
    for (int32_t d = 1; d < sets; ++d) {
      double behind = weight[d] * std::max<double>(i, 1) - taken[d];
      if (behind > most) { most = behind; best = d; }
    }
    set[i] = best; sample[i] = taken[best]++;
  }
  delete[] taken;
}
"""


def document_lengths(number: int) -> np.ndarray:
    return np.random.default_rng(0).geometric(1 / MEAN_TOKENS, number).astype(np.int32)


def ours(number: int, epochs: int) -> dict:
    lengths = document_lengths(number)
    num_samples = (int(lengths.sum(dtype=np.int64)) * epochs - 1) // SEQUENCE_LENGTH
    built, found = _measured(lambda: build_indices(lengths, 0, num_samples, SEQUENCE_LENGTH, SEED))
    (_, sample), blended = _measured(lambda: blending_indices(BLEND_WEIGHTS, number))
    return {
        "index": found,
        "blend": blended,
        "check": (int(built["sample_index"].sum(dtype=np.int64)), int(sample.sum())),
    }


def published(number: int, epochs: int) -> dict:
    library = _compile()
    lengths = document_lengths(number)
    num_samples = (int(lengths.sum(dtype=np.int64)) * epochs - 1) // SEQUENCE_LENGTH

    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return array.ctypes.data_as(ctypes.c_void_p)

    def build():
        rng = np.random.RandomState(SEED)
        order = np.tile(np.arange(number, dtype=np.int32), epochs)
        rng.shuffle(order)
        index = np.empty((num_samples + 1, 2), np.int64)
        size = ctypes.c_int64(num_samples)
        length = ctypes.c_int32(SEQUENCE_LENGTH)
        library.sample_index(pointer(lengths), pointer(order), size, length, pointer(index))
        shuffled = np.arange(num_samples, dtype=np.uint32)
        rng.shuffle(shuffled)
        return index

    def blend():
        weights = np.array(BLEND_WEIGHTS)
        dataset = np.empty(number, np.int16)
        sample = np.empty(number, np.int64)
        sets = ctypes.c_int32(len(weights))
        size = ctypes.c_int64(number)
        library.blend(pointer(weights), sets, size, pointer(dataset), pointer(sample))
        return sample

    index, found = _measured(build)
    sample, blended = _measured(blend)
    return {"index": found, "blend": blended, "check": (int(index.sum()), int(sample.sum()))}


def _compile() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "indices.cpp"
        library = Path(folder) / "indices.so"
        source.write_text(SOURCE)
        subprocess.run(["g++", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def _measured(build) -> tuple:
    """-> (result, (seconds, bytes at the peak)); a second run counts the bytes."""
    start = time.perf_counter()
    build()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    result = build()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, (seconds, peak)


def main(arguments: list[str]) -> None:
    values = only(arguments, {"documents": "10000000", "epochs": "1"})
    number = int(values["documents"])
    epochs = int(values["epochs"])
    checks = []
    for name, measure in (("megajax", ours), ("published algorithm, C++", published)):
        found = measure(number, epochs)
        checks.append(found["check"])
        cells = [f"{what} {found[what][0]:.2f} s, {format_bytes(found[what][1])}" for what in ("index", "blend")]
        print(f"{name:<26} {number:,} documents, {epochs} epochs: {'; '.join(cells)}", flush=True)
    if checks[0] != checks[1]:
        raise ValueError(f"the two do not agree: {checks}")


if __name__ == "__main__":
    run(main)
