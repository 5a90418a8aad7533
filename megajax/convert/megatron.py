"""Imports Megatron Core checkpoints of GPT, BERT, T5 and Mamba hybrids as run directories with parameters only.

python -m megajax.convert.megatron import --from=SAVE --run_dir=RUN [--iteration=N --dtype=bfloat16 --tokenizer=SPEC]

SAVE is the folder that Megatron saved to, or one iter_* in it: torch_dist or torch, of any tensor, pipeline and data
parallel size. The model follows from the arguments in the checkpoint. infer.py reads RUN, and --checkpoint.start_from
begins a run with it. The state of the optimizer is not read. --dry_run shows what maps to what and writes nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from megajax.config import Config, differences
from megajax.terminal.command_line import choose, errors_in_one_line
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """A checkpoint of Megatron as a run directory."""

    from_: str
    """Folder that Megatron saved to, or one iter_* in it."""
    run_dir: str | None = None
    """Run directory to write."""
    iteration: int | None = None
    """Default: the newest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the matrices; default: as they are."""
    tokenizer: str | None = None
    """bytes, null:VOCAB, PATH.model, PATH/tokenizer.json or PATH.tiktoken."""
    dry_run: bool = False
    """Show what would be read and write nothing."""

    def __call__(self) -> None:
        if self.dry_run:
            _print_map(*read(self.from_, self.iteration, self.tokenizer))
            return
        if self.run_dir is None:
            raise ValueError("run_dir is missing: give --run_dir=RUN, or --dry_run to write nothing")
        chosen = dict(iteration=self.iteration, dtype=self.dtype, tokenizer=self.tokenizer)
        checkpoint, config = import_checkpoint(self.from_, self.run_dir, **chosen)
        print(f"{self.run_dir}: parameters of {checkpoint.folder}, step {checkpoint.iteration}")
        named = checkpoint.arguments.get("tokenizer_type")
        if self.tokenizer is None and named != "NullTokenizer" and config.data.tokenizer.startswith("null:"):
            print(f"{named}: no tokenizer file was found, so texts are token ids; --tokenizer=PATH selects one")


def main(arguments: Sequence[str] | None = None) -> None:
    with errors_in_one_line():
        choose({"import": Import}, arguments, "python -m megajax.convert.megatron", __doc__)()


if __name__ == "__main__":
    main()
