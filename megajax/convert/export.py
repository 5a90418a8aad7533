"""Exports the parameters of a run, for serving: python -m megajax.convert.export --run=DIR --output=DIR [--step=N
--dtype=bfloat16]
With programs that run without megajax: ... --stablehlo [--batch_size=1 --max_length=N]

The output is a run directory that infer.py reads on any mesh (weights/export.py), or the programs with their parameters
(weights/stablehlo.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from megajax.terminal.command_line import errors_in_one_line, parse
from megajax.weights.export import export


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    """Directory of a run (runs/NAME)."""
    output: str
    """Directory to write."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the matrices; default: unchanged."""
    stablehlo: bool = False
    """Write programs that run without megajax."""
    batch_size: int = 1
    """With --stablehlo: sequences per batch."""
    max_length: int | None = None
    """With --stablehlo: tokens per sequence; default: that of training."""


def main(arguments: Sequence[str] | None = None) -> None:
    with errors_in_one_line():
        chosen = parse(Options, arguments, "python -m megajax.convert.export", __doc__.partition(":")[0])
        parts = (chosen.run, chosen.output, chosen.step, chosen.dtype)
        if chosen.stablehlo:
            from megajax.weights.stablehlo import export_programs

            step = export_programs(*parts, batch_size=chosen.batch_size, max_length=chosen.max_length)
        else:
            step = export(*parts)
    print(f"{chosen.output}: parameters of {chosen.run}, step {step}")


if __name__ == "__main__":
    main()
