"""Imports Megatron Core checkpoints of GPT, BERT, T5 and Mamba hybrids as run directories with parameters only.

python -m megajax.convert.megatron import --from=SAVE --run_dir=RUN [--iteration=N --dtype=bfloat16 --tokenizer=SPEC]

SAVE is the folder that Megatron saved to, or one iter_* in it: torch_dist or torch, of any tensor, pipeline and data
parallel size. The model follows from the arguments in the checkpoint. infer.py reads RUN, and --checkpoint.start_from
begins a run with it. The state of the optimizer is not read. --dry_run shows what maps to what and writes nothing.
"""

import argparse
from collections.abc import Sequence

from megajax.config import Config, differences
from megajax.terminal.command_line import Parser, errors_in_one_line
from megajax.weights.megatron.checkpoint import Checkpoint
from megajax.weights.megatron.import_checkpoint import import_checkpoint, read


def _print_map(checkpoint: Checkpoint, config: Config) -> None:
    print(f"{checkpoint.folder}: iteration {checkpoint.iteration}, {len(checkpoint.parameters)} parameters")
    for name, array in checkpoint.parameters.items():
        print(f"  {name} {array.dtype}{list(array.shape)}")
    print(f"  --model.kind={config.model.kind}")
    for line in differences(type(config.model)(), config.model, "--model."):
        field, _, change = line.partition(": ")
        print(f"  {field}={change.rpartition(' -> ')[2]}")
    print(f"  --data.tokenizer={config.data.tokenizer}")


def _import(flags: argparse.Namespace) -> None:
    source = getattr(flags, "from")
    if flags.dry_run:
        _print_map(*read(source, flags.iteration, flags.tokenizer))
        return
    if flags.run_dir is None:
        raise ValueError("run_dir is missing: give --run_dir=RUN, or --dry_run to write nothing")
    chosen = dict(iteration=flags.iteration, dtype=flags.dtype, tokenizer=flags.tokenizer)
    checkpoint, config = import_checkpoint(source, flags.run_dir, **chosen)
    print(f"{flags.run_dir}: parameters of {checkpoint.folder}, step {checkpoint.iteration}")
    named = checkpoint.arguments.get("tokenizer_type")
    if flags.tokenizer is None and named != "NullTokenizer" and config.data.tokenizer.startswith("null:"):
        print(f"{named}: no tokenizer file was found, so texts are token ids; --tokenizer=PATH selects one")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m megajax.convert.megatron", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{import}")
    into = commands.add_parser("import", help="a checkpoint of Megatron as a run directory")
    into.add_argument("--from", required=True, help="folder that Megatron saved to, or one iter_* in it")
    into.add_argument("--run_dir", help="run directory to write")
    into.add_argument("--iteration", type=int, help="default: the newest")
    into.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matrices; default: as they are")
    into.add_argument("--tokenizer", help="bytes, null:VOCAB, PATH.model, PATH/tokenizer.json or PATH.tiktoken")
    into.add_argument("--dry_run", action="store_true", help="show what would be read and write nothing")
    into.set_defaults(run=_import)
    with errors_in_one_line():
        flags = parser.parse_args(arguments)
        flags.run(flags)


if __name__ == "__main__":
    main()
