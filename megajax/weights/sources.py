"""Where weights come from: a step of a run, or a Hugging Face folder."""

from pathlib import Path
from typing import Protocol

from megajax import hub
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import Rows
from megajax.checkpoint.piecewise import StoredParameter, StoredParams
from megajax.checkpoint.steps import find_step, read_meta
from megajax.config import Config
from megajax.data.tokenizers.load import load_saved_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer, read_json
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.weights.hugging_face.adapter import is_adapter, open_folder
from megajax.weights.hugging_face.folder import is_folder


class WeightSource(Protocol):
    """What a run starts with; str() describes it in messages."""

    @property
    def config(self) -> Config: ...

    reads_parts: bool
    """Whether `restore_params` can be asked for some of the weights."""

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        """The weights with the dtypes and shardings of the abstract arrays. layer_rows: layer number of each of their
        rows."""


class StoredWeights(Protocol):
    """Weights that an engine reads layer by layer; str() describes them in messages."""

    def open(self, name: str, layer_rows: Rows) -> StoredParameter:
        """A parameter, to be read layer by layer. Raises ValueError if it cannot be read."""

    @property
    def weight_format(self) -> WeightFormat | None:
        """In which matrices of layers are stored; None: not quantised, or in a way that only training reads."""

    def levels(self, name: str, layer: int | None) -> QuantizedWeight | None:
        """A matrix of a layer as it is stored in weight_format, with arrays of NumPy; None: this one is not."""


class Source(WeightSource, StoredWeights, Protocol):
    """What is served, too."""

    def tokenizer(self) -> Tokenizer:
        """Raises ValueError if it is not the tokenizer that the weights were trained with."""

    @property
    def is_foreign(self) -> bool:
        """Whether the weights come from another framework, where Tokenizer.start_ids precede each text."""


class SavedStep:
    def __init__(self, run_dir: str | Path, step: int | None = None):
        """step: default: the newest. Raises ValueError if it does not exist."""
        self.run_dir = run_dir
        self.step = find_step(run_dir, step)
        self.config = Config.load(run_dir, self.step)

    reads_parts = False

    def __str__(self) -> str:
        return f"{self.run_dir}, step {self.step}"

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        with Checkpointer(self.run_dir, None) as checkpointer:
            return checkpointer.restore_params(self.step, abstract, layer_rows)

    def open(self, name: str, layer_rows: Rows) -> StoredParameter:
        return StoredParams(self.run_dir, self.step, layer_rows).parts(name)

    weight_format = None

    def levels(self, name: str, layer: int | None) -> None:
        return None

    @property
    def is_foreign(self) -> bool:
        return "folder" in read_json(str(Path(self.run_dir) / "exported.json"))

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.run_dir, self.step, self.config.data.tokenizer)


def open_source(path: str | Path, step: int | None = None) -> Source:
    """Raises ValueError if `path` is neither a run with this step (default: the newest) nor a Hugging Face folder or
    name (hub.py), of a model or of an adapter."""
    path = hub.local(path)
    if not is_folder(path) and not is_adapter(path):
        return SavedStep(path, step)
    if step is not None:
        raise ValueError(f"step={step}: {path} is a Hugging Face folder, which has no steps; leave it out")
    return open_folder(path)


def tokenizer_of(run_dir: str | Path, step: int, spec: str) -> Tokenizer:
    """Raises ValueError if it is not the tokenizer that the step was trained with."""
    tokenizer = load_saved_tokenizer(run_dir, spec)
    meta = read_meta(run_dir, step)
    found = {"tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
    other = [f"{name}: {meta[name]} -> {value}" for name, value in found.items() if meta.get(name, value) != value]
    if other:
        raise ValueError(
            f"run={run_dir}: step {step} was trained with another tokenizer ({'; '.join(other)}); restore the "
            "files tokenizer* of the run"
        )
    return tokenizer
