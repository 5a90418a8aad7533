"""Hugging Face folders in and out, without torch.

python -m megajax.convert.hugging_face import --from=DIR --run_dir=RUN [--dry_run]
python -m megajax.convert.hugging_face export --run=RUN --to=DIR [--step=N --dtype=bfloat16 --quantize=float8 --dry_run]
python -m megajax.convert.hugging_face export --run=RUN --to=DIR --merge [...]

import writes a run directory as python -m megajax.convert.export does: infer.py reads it, and --checkpoint.start_from
begins a run with it. export writes config.json, weights, tokenizer and generation config as transformers and vLLM read
them, and a model card. Of a run with adapters (lora.rank) it writes these alone, as PEFT reads them, or with --merge
the whole model.
Neither holds the model in memory: both read and write parts of at most megajax.checkpoint.piecewise.PIECE_BYTES.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megajax.config import Config
from megajax.convert.card import write_card
from megajax.terminal.command_line import choose, errors_in_one_line
from megajax.weights.hugging_face.adapter import open_folder
from megajax.weights.hugging_face.adapter_export import AdapterExport
from megajax.weights.hugging_face.export import EXPORTED, Export
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.quantized import Quantization
from megajax.weights.hugging_face.tensor_files import TensorForm


def _print_map(found: Folder | Export, forms: dict[str, TensorForm]) -> None:
    """One line a row of the table: their tensor, its form, our parameters."""
    print(f"{found.family.architecture}: {len(forms)} tensors, {sum(form.nbytes for form in forms.values()):,} bytes")
    for row in found.map.rows:
        tensor = row[0]
        form = forms[tensor.name]
        ours = ", ".join(part.name for part in tensor.parts)
        count = "" if len(row) == 1 else f" x {len(row)}"
        print(f"  {tensor.name}{count} {form.dtype}{list(form.shape)}  <->  {ours}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """A Hugging Face folder as a run directory."""

    from_: str
    """Folder with config.json and *.safetensors, or with an adapter of PEFT."""
    run_dir: str | None = None
    """Run directory to write."""
    dry_run: bool = False
    """Say what maps to what, and write nothing."""

    def __call__(self) -> None:
        if self.dry_run:
            folder = open_folder(self.from_)
            _print_map(folder, folder.forms)
            return
        if self.run_dir is None:
            raise ValueError("run_dir is missing: give --run_dir=RUN, or --dry_run to write nothing")
        folder = import_folder(self.from_, self.run_dir)
        print(f"{self.run_dir}: {folder.family.architecture} from {folder}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """A run as a Hugging Face folder."""

    run: str
    """Directory of a run (runs/NAME)."""
    to: str | None = None
    """Folder to write."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of all tensors but the biases of routers; default: as they are stored."""
    architecture: str | None = None
    """Such as LlamaForCausalLM; default: where the weights came from, or fitting."""
    quantize: Literal["float8", "int8"] | None = None
    """Matrices of layers in 8 bits; megajax quantize calibrates them first."""
    merge: bool = False
    """Merge the adapters of a run into its matrices, in float32."""
    dry_run: bool = False
    """Say what maps to what, and write nothing."""

    def __call__(self) -> None:
        if self.to is None and not self.dry_run:
            raise ValueError("to is missing: give --to=DIR, or --dry_run to write nothing")
        if Config.load(self.run, self.step).lora.rank and not self.merge:
            self._export_adapter()
            return
        quantization = Quantization(EXPORTED[self.quantize]) if self.quantize else None
        found = Export(self.run, self.step, self.dtype, self.architecture, quantization, merge=self.merge)
        if self.to is None or self.dry_run:
            _print_map(found, found.forms)
            return
        found.write(self.to)
        write_card(Path(self.to), self.run, found.step)
        print(f"{self.to}: {found.family.architecture} from {self.run}, step {found.step}")
        if found.merged is not None:
            error = found.merged.error
            advice = "; --dtype=float32 loses nothing" if error > 1e-4 else ""
            print(f"of what the adapters add to the matrices, rounding these lost {error:.2%}{advice}")

    def _export_adapter(self) -> None:
        if self.dtype or self.quantize:
            raise ValueError(f"run={self.run} has adapters, which are written in float32; use --merge for the model")
        found = AdapterExport(self.run, self.step, self.architecture)
        if self.to is None or self.dry_run:
            for name, form in found.forms.items():
                print(f"  {name} {form.dtype}{list(form.shape)}")
            return
        found.write(self.to)
        write_card(Path(self.to), self.run, found.step)
        print(f"{self.to}: adapters of {found.family.architecture} from {self.run}, step {found.step}")


def main(arguments: Sequence[str] | None = None) -> None:
    commands = {"import": Import, "export": ExportOptions}
    with errors_in_one_line():
        choose(commands, arguments, "python -m megajax.convert.hugging_face", __doc__)()


if __name__ == "__main__":
    main()
