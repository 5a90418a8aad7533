"""Uploads a run, or a folder that was exported from one, to the Hugging Face hub: megajax push RUN ORG/NAME

A run is exported first (python -m megajax.convert.hugging_face export), with a model card, README.md; a folder keeps
the card that it has. As with hf upload, a new model is public unless --private is given, and the token is that of
HF_TOKEN or hf auth login.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from megajax import hub
from megajax.checkpoint.steps import find_step
from megajax.convert.card import NAME, write_card
from megajax.convert.hugging_face import ExportOptions
from megajax.terminal.command_line import POSITIONAL, errors_in_one_line, parse
from megajax.weights.hugging_face.adapter import is_adapter
from megajax.weights.hugging_face.folder import is_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[str, POSITIONAL]
    """Directory of a run (runs/NAME), or a folder that was exported from one."""
    name: Annotated[str, POSITIONAL]
    """ORG/NAME of the model on the hub; it is made if there is none."""
    private: bool = False
    """Let only its owner see it."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of all tensors but the biases of routers; default: as they are stored."""
    merge: bool = False
    """Merge the adapters of a run into its matrices, in float32."""

    def __call__(self) -> None:
        name = self.name.removeprefix(hub.PREFIX)
        is_exported = is_folder(self.run) or is_adapter(self.run)
        if is_exported and (self.step is not None or self.dtype is not None or self.merge):
            raise ValueError(f"run={self.run} is exported already: --step, --dtype and --merge are for a run")
        if not is_exported:
            find_step(self.run, self.step)
        with hub.problems(name) as hugging_face:
            url = hugging_face.HfApi().create_repo(name, private=self.private or None, exist_ok=True)
            if self.private and not hugging_face.HfApi().model_info(name).private:
                raise ValueError(f"name={name} is public already; change that on {url}, or leave --private out")
        if is_exported:
            self._upload(Path(self.run), name)
        else:
            with tempfile.TemporaryDirectory(prefix=".push.", dir=self.run) as temporary:
                folder = Path(temporary) / "export"
                ExportOptions(run=self.run, to=str(folder), step=self.step, dtype=self.dtype, merge=self.merge)()
                self._upload(folder, name)
        print(f"{self.run}: on {url}")

    def _upload(self, folder: Path, name: str) -> None:
        write_card(folder)
        card = folder / hub.CARD
        card.write_text(card.read_text(encoding="utf-8").replace(NAME, name), encoding="utf-8")
        message = f"Upload {Path(self.run).resolve().name} of megajax"
        with hub.problems(name) as hugging_face:
            hugging_face.HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)


def main(arguments: Sequence[str] | None = None) -> None:
    with errors_in_one_line():
        parse(Options, arguments, "megajax push", __doc__)()


if __name__ == "__main__":
    main()
