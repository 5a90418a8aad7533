"""Rows of what the package datasets reads: a dataset of the Hugging Face hub, a folder of `save_to_disk`, or one of
files that `load_dataset` reads. They are streamed: neither files nor rows are kept, only what is made of them.

hugging_face:NAME[@REVISION][:CONFIG[:SPLIT]], with a folder or a name of the hub; SPLIT is train by default, and
train[:1000] its first thousand rows.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megajax import hub

if TYPE_CHECKING:
    import datasets

ROWS = 256  # of a batch
SAVED = ("state.json", "dataset_dict.json")  # of save_to_disk


class Rows(NamedTuple):
    name: str
    """A folder, or a name of the hub with a revision."""
    config: str | None
    split: str
    most: int | None
    """Rows that are read; None: all."""

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.name)

    @property
    def files(self) -> list[str]:
        """Those of a folder."""
        return sorted(str(path) for path in Path(self.name).rglob("*") if path.is_file())

    @property
    def version(self) -> Any:
        """What changes with the content, as JSON: the commit on the hub, names, sizes and times of files."""
        if not self.is_local:
            return hub.dataset_commit(self.name)
        stats = ((path, os.stat(path)) for path in self.files)
        return [(os.path.relpath(path, self.name), stat.st_size, stat.st_mtime_ns) for path, stat in stats]

    def open(self) -> "datasets.IterableDataset":
        """Raises ValueError in one line if it cannot be opened."""
        import datasets

        repo, _, _ = self.name.partition("@")
        try:
            if self.is_local and any(os.path.isfile(os.path.join(self.name, name)) for name in SAVED):
                saved = datasets.load_from_disk(self.name)
                parts = saved if isinstance(saved, dict) else datasets.DatasetDict({"train": saved})
                if self.split not in parts:
                    raise ValueError(
                        f"Bad split: {self.split}. Available splits: {list(parts)}"
                    )  # as load_dataset says
                rows = parts[self.split].to_iterable_dataset()
            elif self.is_local:
                rows = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
            else:
                commit = hub.dataset_commit(self.name)
                rows = datasets.load_dataset(repo, self.config, split=self.split, revision=commit, streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.paths: {hub.PREFIX}{self.name}: {' '.join(str(error).split())}") from None
        return rows if self.most is None else rows.take(self.most)

    def columns(self) -> list[str]:
        rows = self.open()
        return list(rows.column_names or next(iter(rows), {}))

    def batches(self, columns: Sequence[str]) -> Iterator[list[dict]]:
        """The rows in order, ROWS at a time, without the other columns."""
        tables: Iterator[Any] = self.open().select_columns(list(columns)).with_format("arrow").iter(ROWS)
        return (table.to_pylist() for table in tables)


def rows_of(path: str) -> Rows:
    """What hugging_face:... names."""
    text = path.removeprefix(hub.PREFIX)
    name, config, split = (text, "", "") if os.path.isdir(text) else (*text.split(":", 2), "", "")[:3]
    found = re.fullmatch(r"([^\[]+)(?:\[:(\d+)\])?", split or "train")
    if found is None:
        raise ValueError(f"data.paths: {path}: the split {split!r} is no name, or name[:1000] for its first rows")
    return Rows(name, config or None, found[1], None if found[2] is None else int(found[2]))
