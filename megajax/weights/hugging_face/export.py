"""Writes a run as a Hugging Face folder, as transformers and vLLM read it, without torch.

Memory holds parts of at most checkpoint.piecewise.PIECE_BYTES, not the model.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.piecewise import PiecewiseArray, StoredParams, pieces
from megajax.checkpoint.steps import find_step
from megajax.config import Config
from megajax.data.tokenizers.libraries import HuggingFaceTokenizer, SentencePieceTokenizer
from megajax.data.tokenizers.load import load_saved_tokenizer, save_tokenizer
from megajax.data.tokenizers.tokenizer import configured_tokens, read_json
from megajax.models.model import Model
from megajax.parameters import named
from megajax.precision import DTYPES
from megajax.quantization.weights import WeightFormat
from megajax.terminal.progress import progress_bar
from megajax.weights.hugging_face.adapter import base_of, is_adapter
from megajax.weights.hugging_face.folder import is_folder
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.import_folder import TOKEN_IDS, write_json
from megajax.weights.hugging_face.mapping import family_for, family_of
from megajax.weights.hugging_face.quantized import Quantization, quantized_rows, written_config, written_forms
from megajax.weights.hugging_face.stored_adapters import MergedParams, StoredAdapters
from megajax.weights.hugging_face.tensor_files import SHARD_BYTES, ShardWriter, TensorForm
from megajax.weights.hugging_face.translate import write_options
from megajax.weights.run_directory import new_directory
from megajax.weights.tensor_map import Part, Tensor

logger = logging.getLogger("megajax")


EXPORTED = {"float8": WeightFormat("float8", "dynamic"), "int8": WeightFormat("int8", "dynamic")}
"""The formats that need no calibration; inputs are rounded with a scale per token."""
_CLASSES = {HuggingFaceTokenizer: "PreTrainedTokenizerFast", SentencePieceTokenizer: "LlamaTokenizer"}


class Export:
    """One step of a run as a folder, before anything is written."""

    def __init__(
        self, run_dir: str | Path, step: int | None, dtype: str | None, architecture: str | None,
        quantization: Quantization | None = None, *, merge: bool = False,
    ):  # fmt: skip
        """merge: the adapters into their matrices. Raises ValueError for a step that is not there, for a model that no
        family of theirs has, and for adapters that are not merged."""
        self.run_dir = Path(run_dir)
        self.step = find_step(run_dir, step)
        config = Config.load(run_dir, self.step)
        config.model.check_exports()
        if config.lora.rank and not merge:
            raise ValueError(
                f"run={run_dir} has adapters (lora.rank={config.lora.rank}) beside its matrices; use --merge"
            )
        self.tokenizer = load_saved_tokenizer(run_dir, config.data.tokenizer)
        self.family = family_of_run(self.run_dir, config, architecture)
        written = self.family.form.trained_for(config.model, config.training.sequence_length)
        self._written = written
        self.map = self.family.map_of(written)
        model = Model(written)
        self._stored = StoredParams(run_dir, self.step, model.layer_rows)
        self.merged: MergedParams | None = None
        if merge:
            adapters = StoredAdapters(run_dir, self.step, config, self.map)
            self.merged = MergedParams(adapters, self.map, config.precision.compute_dtype)
        self._dtypes = _dtypes(model, (self.merged or self._stored).dtypes)
        self.forms = {tensor.name: self._form(tensor, dtype) for tensor in self.map.tensors}
        self.generation = self.family.form.generation(self._generation_config(), self.tokenizer)
        (first, *_) = self.forms.values()
        ids = {name: self.generation.get(name) for name in TOKEN_IDS}  # null where transformers would take another
        ids |= {name: self.generation[name] for name in ("decoder_start_token_id",) if name in self.generation}
        self.options = ids | write_options(self.family, written)
        if "id2label" in self.options:
            self.options |= _class_names(self.run_dir)
        self.options |= {"dtype": str(first.dtype), "torch_dtype": str(first.dtype)}
        self._quantization = quantization
        self._quantized: dict[str, Quantization] = {}
        """By the names of the matrices."""
        if quantization is not None:
            written.check_generates()
            # tied: a module without tensors of its own
            self._quantize(quantization, ["lm_head"] if written.tied_embeddings else [])

    def _quantize(self, quantization: Quantization, ignored: list[str]) -> None:
        """Replaces the forms of the matrices that are quantised, and describes them in config.json. ignored: modules
        that are not. Raises ValueError for a model that nothing serves in 8 bits."""
        records = self.map.records
        format = quantization.format
        for row in self.map.rows:
            part = row[0].parts[0]
            if not part.num_inputs or records[part.name].role == "embedding":
                continue
            if not all(records[part.name].is_quantizable for part in row[0].parts):
                ignored.append(_module_of(row))
            elif row[0].layout == "conv1d":
                raise ValueError(
                    f"quantize={format.dtype}: the matrices of {self.family.architecture} are no Linear modules, and "
                    "nothing reads them in 8 bits; serve the run with --weight_dtype instead"
                )
            else:
                self._quantized |= {tensor.name: quantization for tensor in row}
        forms = self.forms
        self.forms = {}
        for name, form in forms.items():
            self.forms |= written_forms(name, form, format) if name in self._quantized else {name: form}
        self.options["quantization_config"] = written_config(format, ignored)

    def write(self, to: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Raises ValueError if the directory exists or the step is damaged; then nothing is left."""
        with new_directory(to, "to") as new:
            writer = ShardWriter(new, self.forms, shard_bytes)
            total = sum(form.nbytes for form in self.forms.values())
            with progress_bar("export") as advance:
                for row in self.map.rows:
                    self._write_row(row, writer, lambda nbytes: advance(nbytes, total))
            write_json(new / "config.json", self.options)
            self._write_tokenizer(new)
            self.family.form.write_beside(self._written, new)
            if not (new / "generation_config.json").is_file():
                write_json(new / "generation_config.json", self.generation)

    def _write_row(self, row: list[Tensor], writer: ShardWriter, advance: Callable[[int], None]) -> None:
        """The tensors that are made of the same arrays."""
        arrays = {part.name: self._open(part.name, row[0]) for part in row[0].parts}
        for tensor in row:
            quantization = self._quantized.get(tensor.name)
            whole = writer[tensor.name] if quantization is None else np.empty(tensor.shape, np.float32)
            for part, view in zip(tensor.parts, tensor.views(whole), strict=True):
                self._write_part(arrays[part.name], part, view)
            if quantization is not None:
                self._write_quantized(tensor, whole, writer, quantization)
            advance(self.forms[tensor.name].nbytes)

    def _open(self, name: str, tensor: Tensor) -> PiecewiseArray:
        if self.merged is None:
            return self._stored.open(name)
        is_rounded_here = tensor.name not in self._quantized
        return self.merged.open(name, self.forms[tensor.name].dtype if is_rounded_here else np.dtype(np.float32))

    def _write_quantized(
        self, tensor: Tensor, matrix: np.ndarray, writer: ShardWriter, quantization: Quantization
    ) -> None:
        name = tensor.name
        levels, scale = quantized_rows(matrix, self.forms[name].dtype)
        writer[name][...] = levels
        writer[name + "_scale"][...] = scale
        if quantization.format.inputs == "static":
            scales = [quantization.input_scale(part.name, self.map.row_of(part)[0]) for part in tensor.parts]
            writer[name.removesuffix("weight") + "input_scale"][...] = max(scales)

    def _write_part(self, array: PiecewiseArray, part: Part, view: np.ndarray) -> None:
        layer, *expert = part.at or (None,)
        array = array.at(self._stored.row_of(part.name, layer))
        if self._quantization is not None and part.name in self._quantization.factors:
            array = array.times(self._quantization.factors[part.name][self.map.row_of(part)[0]])
        array = array.at(tuple(expert))
        if view.shape != part.shape:  # heads on two axes
            view[...] = array.read(tuple(map(slice, part.shape))).reshape(view.shape)
            return
        for index in pieces(part.shape, array.dtype):
            view[index] = array.read(index)

    def _form(self, tensor: Tensor, dtype: str | None) -> TensorForm:
        if all(self.map.records[part.name].role == "variable" for part in tensor.parts):
            dtype = None  # router biases change in small steps; transformers keeps them in float32 too
        stored = {self._dtypes[part.name] for part in tensor.parts}
        found = stored.pop() if len(stored) == 1 else np.dtype(np.float32)
        return TensorForm(tensor.shape, np.dtype(DTYPES[dtype]) if dtype else found)

    def _generation_config(self) -> dict[str, Any]:
        found = read_json(str(self.run_dir / "generation_config.json"))
        if found:
            return found
        tokens = configured_tokens(self.tokenizer.path)
        ids = {f"{name}_id": self.tokenizer.token_id(text) for name, text in tokens.items()}
        ids["eos_token_id"] = self.tokenizer.eod_id
        return {name: ids[name] for name in TOKEN_IDS if ids.get(name) is not None}

    def _write_tokenizer(self, new: Path) -> None:
        name = next((name for kind, name in _CLASSES.items() if isinstance(self.tokenizer, kind)), None)
        if name is None:
            logger.warning("no tokenizer is written: transformers has none for %s", self.tokenizer.identity)
            return
        save_tokenizer(self.tokenizer, new)
        if not (new / "tokenizer_config.json").is_file():
            end = next((text for text, i in self.tokenizer.special_tokens.items() if i == self.tokenizer.eod_id), None)
            options = {"tokenizer_class": name} | ({} if end is None else {"eos_token": end})
            write_json(new / "tokenizer_config.json", options)


def export_run(
    run_dir: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    architecture: str | None = None,
    quantization: Quantization | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Export:
    """Writes the folder `to` from one step of a run (default: the newest).

    dtype: of all tensors but the biases of routers; default: as they are stored. architecture: by the name in
    config.json; default: that of the folder from which the weights came, else the first that has all options of the
    model. quantization: of the matrices of layers. Raises ValueError if the folder exists, or for what cannot be
    exported; then nothing is left.
    """
    found = Export(run_dir, step, dtype, architecture, quantization)
    found.write(to, shard_bytes)
    return found


def family_of_run(run_dir: Path, config: Config, architecture: str | None) -> Family:
    if architecture is None:
        places = [run_dir, *([config.checkpoint.source()[0]] if config.checkpoint.start_from else [])]
        known = next((name for name in map(_architecture, places) if name), None)
        if known is not None:
            try:
                return family_for(config.model, known)
            except ValueError as error:
                logger.warning("not exported as %s, from which the weights came: %s", known, error)
    try:
        return family_for(config.model, architecture)
    except ValueError as error:
        raise ValueError(f"run={run_dir}: {error}") from None


def _module_of(row: Sequence[Tensor]) -> str:
    """Of the tensors of a row: the name of their module, or a pattern if there are several."""
    name = row[0].name.removesuffix(".weight")
    if len(row) == 1:
        return name
    return "re:" + re.sub(r"\\\.\d+\\\.", lambda _: r"\.\d+\.", re.escape(name)) + "$"


def _architecture(place: Path) -> str | None:
    """Of a Hugging Face folder, or of the one from which a run was imported."""
    if is_adapter(place):
        place = base_of(place)
    if is_folder(place):
        with contextlib.suppress(ValueError):
            return family_of(read_json(str(place / "config.json"))).architecture
    return read_json(str(place / "exported.json")).get("architecture")


def _dtypes(model: Model, stored: dict[str, np.dtype]) -> dict[str, np.dtype]:
    """In which the step has each parameter."""
    return {name: stored.get(name, np.dtype(leaf.dtype)) for name, leaf in named(model.abstract_weights).items()}


def _class_names(run_dir: Path) -> dict[str, Any]:
    """The names of the classes of a classifier, as the run has them in data.json."""
    names = read_json(str(run_dir / "data.json")).get("format", {}).get("classes")
    if names is None:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
