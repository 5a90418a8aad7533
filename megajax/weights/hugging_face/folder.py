"""A Hugging Face folder as the source of a run: its model, weights and tokenizer."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.layout import Rows, stack_of
from megajax.checkpoint.piecewise import PiecewiseArray, StoredParameter, pieces
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.tokenizers.load import IN_FOLDER, load_tokenizer
from megajax.data.tokenizers.tokenizer import MERGES, VOCABULARY, Tokenizer, read_json
from megajax.mesh.config import MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.tasks.interface import task_of
from megajax.training.config import TrainingConfig
from megajax.weights.hugging_face.mapping import family_of
from megajax.weights.hugging_face.quantized import DequantizedFiles, read_scheme
from megajax.weights.hugging_face.tensor_files import TensorForm
from megajax.weights.hugging_face.translate import read_options
from megajax.weights.parameter_reader import ParameterReader
from megajax.weights.tensor_map import Tensor

logger = logging.getLogger("megajax")

OTHER_TOKENIZERS = (VOCABULARY, MERGES, "tekken.json")  # that are not read, but for the first two of GPT-2
# Keys of a config.json that count what the files have at least a tensor, or a part of one, for.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families of which transformers makes a GPT-2 tokenizer if tokenizer_config.json does not name another.
GPT2_TOKENIZERS = ("gpt2", "gptj", "starcoder2")


def is_folder(path: str | Path) -> bool:
    """Whether the config.json in `path` is one of transformers, not of a run."""
    try:
        found = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and ("model_type" in found or "architectures" in found)


class Folder:
    """Raises ValueError, naming an option or a tensor, if the folder is not fully supported."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        file = self.path / "config.json"
        if not is_folder(path):
            raise ValueError(f"{file} is not the config.json of a Hugging Face model; give the folder of one")
        self.options: dict[str, Any] = json.loads(file.read_text())
        with problems_in(file):
            self.family = family_of(self.options)
            self.files = DequantizedFiles(self.path, read_scheme(self.options))
            self._check_counts()
            model = self.family.form.read_beside(read_options(self.family, self.options), self.path)
            self.model = self.family.form.in_files(model, self.files.forms)
            self.model.check(MeshConfig(), self._length, ExecutionConfig())
            maps = [self.family.map_of(self.model, table) for table in self.family.tables]
        self.map = next((found for found in maps if all(map(self._name_in_files, found.tensors))), maps[0])
        self._names = self._match()
        self.reader = ParameterReader(
            self.map,
            array_of=lambda tensor: self.files[self._names[tensor.name]],
            dtype_of=lambda tensor: self.files.forms[self._names[tensor.name]].dtype,
            describe=lambda tensor: f"{self._names[tensor.name]} in {self.path}",
        )
        self.tokenizer_spec = self._find_tokenizer()
        """Of data.tokenizer; without a file that can be read, tokens are numbers."""

    def __reduce__(self) -> tuple:
        """Another process opens the folder again."""
        return type(self), (self.path,)

    @property
    def config(self) -> Config:
        """Config of a run with this model and tokenizer."""
        task = task_of(self.model) or Config().task  # of one that cannot be trained
        data = DataConfig(source="mock", tokenizer=self.tokenizer_spec)
        training = TrainingConfig(sequence_length=self._length)
        return Config(model=self.model, task=task, data=data, training=training)

    @property
    def _length(self) -> int:
        return self.model.max_length or self.model.max_positions

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_spec)

    is_foreign = True
    reads_parts = True

    @property
    def forms(self) -> dict[str, TensorForm]:
        """Shapes and dtypes of the tensors of the model, by their names in the table."""
        return {tensor: self.files.forms[name] for tensor, name in self._names.items()}

    def __str__(self) -> str:
        return str(self.path)

    # ------------------------------------------------------------------ weights

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        """The weights with the dtypes and shardings of the abstract arrays; each device reads its shard."""
        if self.files.num_quantized:
            logger.info("%s: %d quantised matrices are dequantised", self, self.files.num_quantized)
        return self.reader.restore(abstract, layer_rows)

    def open(self, name: str, layer_rows: Rows) -> StoredParameter:
        """A parameter, to be read layer by layer, in the dtype of the folder; of a quantised folder in float32."""
        stack = stack_of(name, layer_rows)
        layers = [None] if stack is None else layer_rows[stack].tolist()
        return StoredParameter([(layer, self._of_layer(name, layer)) for layer in layers], None)

    def _of_layer(self, name: str, layer: int | None) -> PiecewiseArray:
        dtype = np.dtype(np.float32) if self.files.num_quantized else self.reader.dtypes[name]
        array = self.reader.array(name, dtype)
        layers = self.map.layers_of(name)
        row = () if layers is None else (layers.tolist().index(layer),)
        order = self.reader.order(name, () if layer is None else (layer,))
        return dataclasses.replace(array.at(row), order=order)

    @property
    def weight_format(self) -> WeightFormat | None:
        """In which matrices of layers are stored; None: not quantised, or in a way that only training reads."""
        return self.files.format

    def levels(self, name: str, layer: int | None) -> QuantizedWeight | None:
        """A matrix of a layer as it is stored in weight_format, with arrays of NumPy; None: this one is not."""
        tensor, number = self.map.source[name, () if layer is None else (layer,)]
        found = None if tensor.layout == "conv1d" else self.files.weight(self._names[tensor.name])
        if found is None:
            return None
        part = tensor.parts[number]

        def of_part(array: np.ndarray) -> np.ndarray:
            """[out, inputs or groups] -> [inputs or groups, *N]."""
            return tensor.with_inputs(array.shape[-1]).split(array)[number]

        values = np.moveaxis(of_part(np.asarray(found.values)), 0, -1)
        inputs = part.shape[part.num_stacked :][: part.num_inputs]
        values = values.reshape(*values.shape[:-1], *inputs[:-1], -1)  # where two levels are a number, the last is half
        scale, zero = jax.tree.map(lambda array: of_part(array.T), (found.scale, found.zero))
        return dataclasses.replace(found, values=values, scale=scale, zero=zero)

    def piecewise(self, model: Model) -> dict:
        """Nested dict of PiecewiseArray, each in the dtype of the folder."""
        return self.reader.piecewise(model, self.reader.dtypes)

    def _find_tokenizer(self) -> str:
        found = next((self.path / name for name in IN_FOLDER if (self.path / name).is_file()), None)
        if found is not None:
            return str(found)
        if self._has_gpt2_tokenizer():
            return str(self.path / VOCABULARY)
        others = [name for name in OTHER_TOKENIZERS if (self.path / name).is_file()]
        logger.warning(
            "%s has %s and neither %s, so tokens are numbers (data.tokenizer=null:%d); for text write tokenizer.json: "
            "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            self.path, " and ".join(others) or "no tokenizer", " nor ".join(IN_FOLDER), self.model.vocab_size,
        )  # fmt: skip
        return f"null:{self.model.vocab_size}"

    def _has_gpt2_tokenizer(self) -> bool:
        named = read_json(str(self.path / "tokenizer_config.json")).get("tokenizer_class")
        if named is None and self.family.model_type in GPT2_TOKENIZERS:
            named = "GPT2Tokenizer"
        has_files = all((self.path / name).is_file() for name in (VOCABULARY, MERGES))
        return has_files and named in ("GPT2Tokenizer", "GPT2TokenizerFast")

    def _check_counts(self) -> None:
        """Raises ValueError for more layers or experts than the files can have, before a model of that size is
        described, which would take minutes."""
        limits = dict.fromkeys(LAYERS, (1, len(self.files.forms)))
        limits |= dict.fromkeys(EXPERTS, (0, max(len(self.files.forms), self.files.largest_dim)))
        for name, (least, most) in limits.items():
            if isinstance(number := self.options.get(name), int | float) and not least <= number <= most:
                raise ValueError(f"{name}={number} does not fit the files, which have {len(self.files.forms)} tensors")

    def _match(self) -> dict[str, str]:
        """{name of a tensor in the table: name in the files}. Raises ValueError for tensors that do not fit."""
        forms = self.files.forms
        names: dict[str, str] = {}
        for tensor in self.map.tensors:
            name = self._name_in_files(tensor)
            if name is None:
                raise ValueError(f"{self.path}: tensor {tensor.name} {list(tensor.shape)} is missing")
            names[tensor.name] = name
        for tensor in self.map.tensors:
            name = names[tensor.name]
            if forms[name].shape != tensor.shape:
                raise ValueError(
                    f"{self.path}: tensor {name} is {list(forms[name].shape)}, but config.json implies "
                    f"{list(tensor.shape)}"
                )
            self._warn_of_unused(tensor, names)
        left = sorted(forms.keys() - set(names.values()))
        form = self.family.form
        unused = [
            name
            for name in left
            if name.endswith(self.family.ignored) or form.is_unused(self.model, name) or self.files.is_empty_bias(name)
        ]
        if unused:
            logger.info("%s: not used by %s: %s", self.path, self.family.architecture, ", ".join(unused))
        if left := [name for name in left if name not in unused and not self._is_copy(name, names)]:
            raise ValueError(f"{self.path}: {len(left)} tensors are unknown in {self.family.architecture}: "
                             f"{', '.join(left[:4])}{' ...' if len(left) > 4 else ''}")  # fmt: skip
        return names

    def _warn_of_unused(self, tensor: Tensor, names: Mapping[str, str]) -> None:
        """transformers has two biases of the output layer of an untied BERT, and uses one."""
        used = {self.map.source[part.name, part.at][0] for part in tensor.parts}
        for other in used - {tensor}:
            if not np.array_equal(self.files[names[tensor.name]], self.files[names[other.name]]):
                logger.warning(
                    "%s: %s is not used by %s, which takes %s instead; an export has the second in both places",
                    self.path, names[tensor.name], self.family.architecture, names[other.name],
                )  # fmt: skip

    def _name_in_files(self, tensor: Tensor) -> str | None:
        """Which may lack the prefix of the base model."""
        spellings = (tensor.name, tensor.name.partition(".")[2])
        return next((name for name in spellings if name in self.files.forms), None)

    def _is_copy(self, name: str, names: Mapping[str, str]) -> bool:
        """Whether a tensor is a copy of another one."""
        copied = self.family.form.copied(self.model, name)
        if copied is None:
            return False
        tensor, _ = self.map.source[copied, ()]
        copy = self.files[name]
        original = self.files[names[tensor.name]]
        same = copy.shape == original.shape and all(
            np.array_equal(copy[piece], original[piece]) for piece in pieces(copy.shape, copy.dtype)
        )
        if not same:
            raise ValueError(f"{self.path}: {name} differs from the {copied}, of which it must be a copy")
        return True


@contextlib.contextmanager
def problems_in(file: Path) -> Generator[None]:
    """Names the file in a ValueError, which is also raised for values of another type than an option expects."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from None
    except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise ValueError(f"{file} has a value of another kind than its key needs ({error})") from None
