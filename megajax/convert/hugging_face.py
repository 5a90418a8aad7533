"""Hugging Face folders in and out, without torch.

python -m megajax.convert.hugging_face import --from=DIR --run_dir=RUN [--dry_run]
python -m megajax.convert.hugging_face export --run=RUN --to=DIR [--step=N --dtype=bfloat16 --quantize=float8 --dry_run]

import writes a run directory as python -m megajax.convert.export does: infer.py reads it, and --checkpoint.start_from
begins a run with it. export writes config.json, weights, tokenizer and generation config as transformers and vLLM read
them. Neither holds the model in memory: both read and write parts of at most megajax.checkpoint.piecewise.PIECE_BYTES.
"""

import argparse
import logging
from collections.abc import Sequence

from megajax.precision import DTYPES
from megajax.terminal.command_line import Parser, errors_in_one_line
from megajax.weights.hugging_face.export import EXPORTED, Export
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.quantized import Quantization
from megajax.weights.hugging_face.tensor_files import TensorForm

logger = logging.getLogger("megajax")


def _print_map(found: Folder | Export, forms: dict[str, TensorForm]) -> None:
    """One line a row of the table: their tensor, its form, our parameters."""
    print(f"{found.family.architecture}: {len(forms)} tensors, {sum(form.nbytes for form in forms.values()):,} bytes")
    for row in found.map.rows:
        tensor = row[0]
        form = forms[tensor.name]
        ours = ", ".join(part.name for part in tensor.parts)
        count = "" if len(row) == 1 else f" x {len(row)}"
        print(f"  {tensor.name}{count} {form.dtype}{list(form.shape)}  <->  {ours}")


def _import(flags: argparse.Namespace) -> None:
    if flags.dry_run:
        folder = Folder(getattr(flags, "from"))
        _print_map(folder, folder.forms)
        return
    folder = import_folder(getattr(flags, "from"), flags.run_dir)
    print(f"{flags.run_dir}: {folder.family.architecture} from {folder}")


def _export(flags: argparse.Namespace) -> None:
    quantization = Quantization(EXPORTED[flags.quantize]) if flags.quantize else None
    found = Export(flags.run, flags.step, flags.dtype, flags.architecture, quantization)
    if flags.dry_run:
        _print_map(found, found.forms)
        return
    found.write(flags.to)
    print(f"{flags.to}: {found.family.architecture} from {flags.run}, step {found.step}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m megajax.convert.hugging_face", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{import,export}")
    into = commands.add_parser("import", help="a Hugging Face folder as a run directory")
    into.add_argument("--from", required=True, help="folder with config.json and *.safetensors")
    into.add_argument("--run_dir", help="run directory to write")
    into.set_defaults(command=_import)
    out = commands.add_parser("export", help="a run as a Hugging Face folder")
    out.add_argument("--run", required=True, help="directory of a run (runs/NAME)")
    out.add_argument("--to", help="folder to write")
    out.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    out.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of all tensors but the biases of routers; default: as they are stored"
    )
    out.add_argument(
        "--architecture", help="such as LlamaForCausalLM; default: where the weights came from, or fitting"
    )
    out.add_argument(
        "--quantize",
        choices=tuple(EXPORTED),
        help="matrices of layers in 8 bits; megajax quantize calibrates them first",
    )
    out.set_defaults(command=_export)
    for command in (into, out):
        command.add_argument("--dry_run", action="store_true", help="say what maps to what, and write nothing")
    with errors_in_one_line():
        flags = parser.parse_args(arguments)
        if not flags.dry_run and not getattr(flags, "run_dir", None) and not getattr(flags, "to", None):
            parser.error("the following arguments are required: --run_dir or --to, or --dry_run")
        flags.command(flags)


if __name__ == "__main__":
    main()
