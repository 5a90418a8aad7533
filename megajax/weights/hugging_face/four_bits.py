"""Matrices in 4 bits, as AWQ, GPTQ and compressed-tensors write them: weight = (level - zero) * scale.

Levels and zeros are 0 to 15, eight in an int32, the first one in its lowest bits. The K inputs are in G groups, one
after the other or as g_idx [K] numbers them (act-order), which share a zero and a scale for each of the N outputs.

    layout          levels                    zeros                          scales               in a word
    awq             qweight [K, N / 8]        qzeros [G, N / 8]              scales [G, N]        0 2 4 6 1 3 5 7
    gptq_v2         qweight [K / 8, N]        qzeros [G, N / 8]              scales [G, N]        in order
    gptq            the same                  0x11111111 less in each word   the same             in order
    pack-quantized  weight_packed [N, K / 8]  weight_zero_point [N / 8, G],  weight_scale [N, G]  in order
                                              8 if there are none

Sources: the tensors of AutoAWQ and of GPTQModel (https://github.com/ModelCloud/GPTQModel), and compressed-tensors
(https://github.com/vllm-project/compressed-tensors).
"""

from typing import Literal, NamedTuple

import numpy as np

from megajax.checkpoint.piecewise import pieces
from megajax.quantization.weights import QuantizedWeight, packed
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.parameter_reader import check_finite

Layout = Literal["awq", "gptq", "gptq_v2", "pack-quantized"]

PER_WORD = 8
SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)  # where the levels of a word are, in order
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
SYMMETRIC_ZERO = np.uint8(8)


class Packing(NamedTuple):
    layout: Layout
    group: int | None
    """Inputs that share a scale; None: all of an output."""
    needs_zeros: bool

    @property
    def names(self) -> dict[str, str]:
        """Ends of the names of tensors."""
        if self.layout == "pack-quantized":
            kinds = dict(levels="packed", zero="zero_point", scale="scale", order="g_idx", shape="shape")
            return {ours: f"weight_{theirs}" for ours, theirs in kinds.items()}
        return dict(levels="qweight", zero="qzeros", scale="scales", order="g_idx")


def packed_matrices(files: TensorFiles, packing: Packing) -> "dict[str, PackedMatrix]":
    """By the names that they have where they are not quantised. Raises ValueError, naming a tensor that does not
    fit."""
    end = packing.names["levels"]
    owners = [name.removesuffix(end) for name in files.forms if name.endswith(f".{end}")]
    return {f"{owner}weight": PackedMatrix(files, owner, packing) for owner in owners}


class PackedMatrix:
    def __init__(self, files: TensorFiles, owner: str, packing: Packing):
        self._files = files
        self._layout = packing.layout
        self._names = {kind: owner + end for kind, end in packing.names.items() if owner + end in files.forms}
        for kind in self._names.keys() & {"levels", "zero", "order"}:
            name = self._names[kind]
            if files.forms[name].dtype != np.int32:
                raise ValueError(f"{name} is {files.forms[name].dtype}, and must be int32; use the folder in bfloat16")
        words = self._shape("levels")
        if self._layout == "awq":
            num_inputs, num_outputs = words[0], words[1] * PER_WORD
        elif self._layout == "pack-quantized":
            num_inputs, num_outputs = words[1] * PER_WORD, words[0]
        else:
            num_inputs, num_outputs = words[0] * PER_WORD, words[1]
        self.shape = num_outputs, num_inputs
        """[out, in]."""
        group = packing.group or num_inputs
        self._num_groups = num_inputs // group
        if num_inputs % group or group % 2:
            raise ValueError(
                f"{self._names['levels']} has {num_inputs} inputs, which are no whole groups of {group}, or of an odd "
                "number; use the folder in bfloat16"
            )
        self._check("scale", (self._num_groups, num_outputs))
        if packing.needs_zeros or "zero" in self._names:
            self._check("zero", (self._num_groups, -(-num_outputs // PER_WORD)))
        if "order" in self._names and self._shape("order") != (num_inputs,):
            raise ValueError(f"{self._names['order']} is {list(self._shape('order'))}, and must be [{num_inputs}]")

    @property
    def tensors(self) -> list[str]:
        """Names of those that it consists of."""
        return list(self._names.values())

    @property
    def is_in_order(self) -> bool:
        """Whether the inputs of a group follow one another."""
        return bool((self._groups() == self._groups_in_order()).all())

    def weight(self) -> QuantizedWeight:
        """[out, in], with arrays of NumPy; of a matrix that is in order."""
        scale = np.ascontiguousarray(self._scale())
        check_finite(self._names["scale"], scale)
        levels = self._levels().reshape(self.shape[0], self._num_groups, -1) - np.uint8(8)
        values = packed(levels).reshape(self.shape[0], -1)
        zero = (self._zero() - SYMMETRIC_ZERO).view(np.int8) if "zero" in self._names else None
        return QuantizedWeight(values, scale, None, "unchanged", zero)

    def dequantized(self) -> np.ndarray:
        """float32 [out, in]."""
        groups = self._groups()
        levels = self._levels()
        zero = self._zero().astype(np.float32)
        scale = self._scale().astype(np.float32)
        out = np.empty(self.shape, np.float32)
        for outputs, inputs in pieces(out.shape, out.dtype):
            place = groups[inputs][None], np.arange(len(out))[outputs][:, None]
            with np.errstate(all="ignore"):  # who reads this refuses what is not finite, by name
                out[outputs, inputs] = (levels[outputs, inputs] - zero[place]) * scale[place]
        return out

    def _levels(self) -> np.ndarray:
        """uint8 [out, in]."""
        words = self._files[self._names["levels"]]
        if self._layout == "awq":
            return _levels(words, AWQ_SHIFTS).T
        return _levels(words if self._layout == "pack-quantized" else words.T)

    def _zero(self) -> np.ndarray:
        """uint8 [G, out]."""
        if "zero" not in self._names:
            return np.full((self._num_groups, self.shape[0]), SYMMETRIC_ZERO, np.uint8)
        words = self._files[self._names["zero"]]
        if self._layout == "awq":
            return _levels(words, AWQ_SHIFTS)
        if self._layout == "pack-quantized":
            return _levels(words.T)[:, : self.shape[0]]
        # Of whole words, as GPTQModel subtracts it: where a zero was 0 it has borrowed from the next one.
        return _levels(words.view(np.uint32) + np.uint32(0x11111111 if self._layout == "gptq" else 0))

    def _scale(self) -> np.ndarray:
        """[G, out], in the dtype of the folder."""
        scale = self._files[self._names["scale"]]
        return scale.T if self._layout == "pack-quantized" else scale

    def _groups(self) -> np.ndarray:
        """int [in]: of which group each input is."""
        if "order" not in self._names:
            return self._groups_in_order()
        groups = np.asarray(self._files[self._names["order"]])
        if groups.min() < 0 or groups.max() >= self._num_groups:
            raise ValueError(
                f"{self._names['order']} numbers groups that {self._names['scale']} does not have; "
                "copy the folder again"
            )
        return groups

    def _groups_in_order(self) -> np.ndarray:
        return np.arange(self.shape[1]) // (self.shape[1] // self._num_groups)

    def _shape(self, kind: str) -> tuple[int, ...]:
        return self._files.forms[self._names[kind]].shape

    def _check(self, kind: str, wanted: tuple[int, int]) -> None:
        """wanted: [groups, outputs or words of them]."""
        wanted = wanted[::-1] if self._layout == "pack-quantized" else wanted
        levels = f"{self._names['levels']} {list(self._shape('levels'))}"
        if kind not in self._names:
            raise ValueError(f"there is no {kind} for {levels}; copy the folder again")
        if self._shape(kind) != wanted:
            raise ValueError(
                f"{self._names[kind]} is {list(self._shape(kind))} and {levels}, which needs {list(wanted)} with 4 "
                f"bits and {self._num_groups} groups; use the folder in bfloat16"
            )


def _levels(words: np.ndarray, shifts: tuple[int, ...] = SHIFTS) -> np.ndarray:
    """int32 [..., W] -> uint8 [..., 8 W]."""
    out = np.empty((*words.shape, PER_WORD), np.uint8)
    for place, shift in enumerate(shifts):
        out[..., place] = words >> shift & 15
    return out.reshape(*words.shape[:-1], -1)
