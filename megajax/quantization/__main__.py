"""Quantises a run: python -m megajax.quantization --run=RUN --to=DIR --format=float8_static --text=FILE ... [options]

Reads some text with the model, finds the ranges of the inputs of its matrices, optionally smooths them (SmoothQuant),
and writes a Hugging Face folder in 8 bits that vLLM, transformers and infer.py read (docs/quantization.md). Prints the
range and the error of each matrix, and the perplexity of the text before and after. DIR/quantization_report.json has
the same numbers. `megajax quantize` is the same command.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from megajax.data.indexed.dataset import prefix_of
from megajax.evaluation.perplexity import Totals, check_files, perplexity
from megajax.evaluation.text_model import TextModel
from megajax.fields.ranges import PositiveInt, Range
from megajax.inference.load import open_model
from megajax.mesh.processes import use_compilation_cache
from megajax.quantization.calibrate import Error, errors, input_ranges
from megajax.quantization.observe import batches_of
from megajax.quantization.smooth import smoothed, smoothing
from megajax.quantization.weights import WeightFormat
from megajax.terminal.command_line import OnDevices, errors_in_one_line, parse
from megajax.training.reporting.console import log_to_stderr
from megajax.weights.hugging_face.export import EXPORTED, export_run
from megajax.weights.hugging_face.quantized import Quantization
from megajax.weights.sources import SavedStep

FORMATS = EXPORTED | {"float8_static": WeightFormat("float8", "static")}
REPORT = "quantization_report.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(OnDevices):
    run: str
    """Directory of a run (runs/NAME)."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    to: str
    """Folder to write."""
    format: Literal["float8", "int8", "float8_static"]
    """Of matrices and of their inputs."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of all other tensors; default: as they are stored."""
    text: tuple[str, ...] = ()
    """Text, .jsonl or .parquet files to calibrate with."""
    tokens: tuple[str, ...] = ()
    """Prefixes of .bin and .idx files to calibrate with."""
    samples: PositiveInt = 128
    """Sequences to calibrate with."""
    max_length: int | None = None
    """Tokens of a sequence; default: training.sequence_length."""
    range: Literal["max", "percentile"] = "max"
    """Of static inputs: what is not clipped."""
    percentile: Annotated[float, Range(above=0, at_most=100)] = 99.99
    """With --range=percentile."""
    smooth: Annotated[float, Range(above=0, below=1)] | None = None
    """SmoothQuant with this alpha, such as 0.5; default: off."""
    limit: int | None = None
    """Perplexity of the first N documents of each file; default: all."""

    @property
    def prefixes(self) -> list[str]:
        return [prefix_of(path) for path in self.tokens]


def main(arguments: Sequence[str] | None = None) -> None:
    log_to_stderr()
    with errors_in_one_line():
        options = parse(Options, arguments, "megajax quantize", __doc__)
        _check(options)
        _run(options)


def _check(options: Options) -> None:
    if not options.text and not options.tokens:
        raise ValueError("quantize: name files with --text=FILE ... or --tokens=PREFIX ...")
    check_files(options.text, options.prefixes)
    if Path(options.to).exists():
        raise ValueError(f"to={options.to} exists; use another, or remove it")


def _run(options: Options) -> None:
    mesh = options.started_mesh()
    use_compilation_cache()
    model = TextModel.load(options.run, mesh, options.step, weights="compute", max_length=options.max_length)
    if not isinstance(model.source, SavedStep):
        raise ValueError(f"run={options.run} is a Hugging Face folder; megajax hugging_face import makes it a run")
    if model.scorer.model.adapters:
        raise ValueError(
            f"run={options.run} has adapters (lora.rank); merge them first: python -m megajax.convert.export "
            f"--run={options.run} --output=MERGED"
        )
    before = _perplexity(model, options)
    quantization, found = calibrated(model, options)
    step = model.source.step
    export = export_run(options.run, options.to, step=step, dtype=options.dtype, quantization=quantization)
    model.scorer.params = {}  # frees the memory of the weights
    written = open_model(options.to, mesh, compute=model.scorer.model.precision.compute)
    model.scorer.params = written.restore()  # as infer.py reads them; the same text, in the same tokens
    after = _perplexity(model, options)
    report = _report(options, found, before, after)
    (Path(options.to) / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    print(_table(found))
    for name, numbers in (("before", before), ("after", after)):
        print(f"perplexity {name}: {numbers['perplexity']:.4f}, {numbers['loss']:.5f} nats per token, "
              f"{numbers['bits_per_byte']:.5f} bits per byte")  # fmt: skip
    print(f"{options.to}: {export.family.architecture} in {options.format} from {options.run}, step {step}")


def calibrated(model: TextModel, options: Options) -> tuple[Quantization, dict[str, Error]]:
    """What to write, and the errors of each matrix."""
    format = FORMATS[options.format]
    scorer = model.scorer
    scorer.params = scorer.model.stacked(scorer.params)
    batches = batches_of(model, options.text, options.prefixes, options.samples)
    factors = {}
    if options.smooth is not None:
        factors = smoothing(scorer.model, scorer.params, scorer.mesh, batches, options.smooth)
        scorer.params = smoothed(scorer.params, factors)
    parts = (scorer.model, scorer.params, scorer.mesh, batches)
    ranges = input_ranges(*parts, options.range, options.percentile) if format.inputs == "static" else {}
    return Quantization(format, ranges, factors), errors(*parts, format, ranges)


def _perplexity(model: TextModel, options: Options) -> dict[str, float]:
    """Of the files, together."""
    found = perplexity(model, options.text, options.prefixes, limit=options.limit)
    return sum(found.values(), Totals()).metrics()


def _report(
    options: Options, found: Mapping[str, Error], before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in ("run", "format", "range", "percentile", "smooth", "samples")}
    matrices = {
        name: dict(range=error.range.tolist(), signal_to_noise_db=error.signal_to_noise.tolist())
        for name, error in found.items()
    }
    return dict(settings=settings, before=before, after=after, matrices=matrices)


def _table(found: Mapping[str, Error]) -> str:
    """A line per matrix, over its layers."""
    width = max(map(len, found))
    lines = [f"{'matrix':<{width}}  largest input  signal to noise, dB: mean  lowest  in layer"]
    for name, error in found.items():
        worst = int(np.argmin(error.signal_to_noise))
        lowest = error.signal_to_noise[worst]
        mean = error.signal_to_noise.mean()
        lines.append(f"{name:<{width}}  {error.range.max():13.4g}  {mean:25.1f}  {lowest:6.1f}  {worst:8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
