"""Exports the parameters of a run, for serving: python -m megajax.convert.export --run=DIR --output=DIR [--step=N
--dtype=bfloat16]
With programs that run without megajax: ... --stablehlo [--batch_size=1 --max_length=N]

The output is a run directory that infer.py reads on any mesh (weights/export.py), or the programs with their parameters
(weights/stablehlo.py).
"""

from collections.abc import Sequence

from megajax.terminal.command_line import Parser, errors_in_one_line
from megajax.weights.export import export


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m megajax.convert.export", description=__doc__.partition(":")[0])
    parser.add_argument("--run", required=True, help="directory of a run (runs/NAME)")
    parser.add_argument("--output", required=True, help="directory to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the matrices; default: unchanged")
    parser.add_argument("--stablehlo", action="store_true", help="write programs that run without megajax")
    parser.add_argument("--batch_size", type=int, default=1, help="with --stablehlo: sequences per batch")
    parser.add_argument(
        "--max_length", type=int, help="with --stablehlo: tokens per sequence; default: that of training"
    )
    with errors_in_one_line():
        flags = parser.parse_args(arguments)
        if flags.stablehlo:
            from megajax.weights.stablehlo import export_programs

            sizes = dict(batch_size=flags.batch_size, max_length=flags.max_length)
            step = export_programs(flags.run, flags.output, flags.step, flags.dtype, **sizes)
        else:
            step = export(flags.run, flags.output, flags.step, flags.dtype)
    print(f"{flags.output}: parameters of {flags.run}, step {step}")


if __name__ == "__main__":
    main()
