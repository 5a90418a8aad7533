"""Names of the Hugging Face hub: huggingface_hub downloads, and its own settings hold (HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE)."""

import atexit
import contextlib
import dataclasses
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Generator
from contextvars import ContextVar
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "hugging_face:"
"""Before the path of a folder, or the name of what the hub has."""
CARD = "README.md"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")
WEIGHTS = "*.safetensors"
MODEL_FILES = (WEIGHTS, CARD, *TOKENIZER_FILES)
OTHER_FILES = ["*/*", "consolidated*"]  # other formats in folders of their own, and a second copy of Mistral's weights

_needs_weights: ContextVar[bool] = ContextVar("whether weights are read", default=True)


class Name(NamedTuple):
    """ORG/NAME[@REVISION], in which revision is a branch, a tag or a commit."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def local(path: str | Path, files: tuple[str, ...] = MODEL_FILES) -> str:
    """The path, unless it begins with hugging_face: what follows is then a folder on this machine, or else the name of
    a model on the hub, whose files are downloaded -> their folder in the cache of huggingface_hub.

    files: patterns of those that are needed. The answer is the same for the life of the process. Raises ValueError, in
    one line, if there is no such folder and it cannot be downloaded.
    """
    text = str(path)
    named = text.removeprefix(PREFIX)
    if named == text or Path(named).is_dir():
        return named
    return _downloaded(named, files) if WEIGHTS not in files or _needs_weights.get() else _without_weights(named)


@contextlib.contextmanager
def without_weights() -> Generator[None]:
    """Models of the hub that are named inside are downloaded without their weights, for what reads names and shapes
    alone: their files have zeros, and exist until this process ends."""
    token = _needs_weights.set(False)
    try:
        yield
    finally:
        _needs_weights.reset(token)


def short_name(path: str | Path) -> str:
    """That of the folder, or of the model on the hub without its owner."""
    named = str(path).removeprefix(PREFIX)
    is_name = named != str(path) and not Path(named).is_dir()
    return named.partition("@")[0].rpartition("/")[2] if is_name else Path(named).resolve().name


def name_of(folder: str | Path) -> Name | None:
    """The name, with the commit, under which a folder was downloaded; None: it is no folder in the cache."""
    found = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", Path(folder).absolute().as_posix())
    return found and Name(found[1].replace("--", "/", 1), found[2])


def dataset_commit(named: str) -> str:
    """The commit of a dataset, ORG/NAME[@REVISION]; without a network, the newest in the cache. Raises ValueError, in
    one line, if there is none."""
    return Path(_downloaded(named, (CARD,), "dataset")).name


@functools.cache
def _downloaded(named: str, files: tuple[str, ...], kind: str = "model") -> str:
    repo, _, revision = named.partition("@")
    with problems(named, kind) as hub:
        return hub.snapshot_download(
            repo, repo_type=kind, revision=revision or None, allow_patterns=list(files), ignore_patterns=OTHER_FILES
        )


@functools.cache
def _without_weights(named: str) -> str:
    with problems(named) as hub:
        if hub.constants.HF_HUB_OFFLINE:
            return _downloaded(named, MODEL_FILES)
        found = Path(_downloaded(named, tuple(pattern for pattern in MODEL_FILES if pattern != WEIGHTS)))
        folder = Path(tempfile.mkdtemp(prefix="megajax-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for path in found.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        api = hub.HfApi()
        of_commit = dict(repo_id=named.partition("@")[0], revision=found.name)
        for name in api.list_repo_files(**of_commit):
            is_other = any(fnmatch(name, pattern) for pattern in OTHER_FILES)
            if fnmatch(name, WEIGHTS) and not is_other and not (folder / name).exists():
                _write_shapes(folder / name, api.parse_safetensors_file_metadata(filename=name, **of_commit))
    return str(folder)


def _write_shapes(path: Path, found: Any) -> None:
    """A file of safetensors with zeros that take no space. found: its SafetensorsFileMetadata."""
    tensors = {name: dataclasses.asdict(tensor) for name, tensor in found.tensors.items()}
    keys = ("dtype", "shape", "data_offsets")
    header = {name: {key: tensor[key] for key in keys} for name, tensor in tensors.items()}
    text = json.dumps({"__metadata__": found.metadata} | header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0))


@contextlib.contextmanager
def problems(named: str, kind: str = "model") -> Generator:
    """huggingface_hub, whose errors become one ValueError each."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise ValueError(
            f"{PREFIX}{named}: no folder on this machine is called {named}; to use the hub, pip install 'megajax[hub]'"
        ) from None
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{named.partition('@')[0]}"
    token = "set HF_TOKEN or run hf auth login"
    try:
        yield huggingface_hub
    except errors.HFValidationError:
        problem = "this is neither a folder on this machine nor a name of the hub, ORG/NAME or ORG/NAME@REVISION"
    except errors.GatedRepoError:
        problem = f"access must be asked for, on {page}; then {token}"
    except errors.RepositoryNotFoundError:
        problem = f"neither a folder on this machine nor, for this user, on {page}; if it is private, {token}"
    except errors.RevisionNotFoundError:
        problem = f"{page} has no such revision"
    except errors.LocalEntryNotFoundError:
        problem = (
            f"neither a folder on this machine nor in the cache of huggingface_hub, and {page} cannot be reached; "
            f"where it can, run hf download {named.replace('@', ' --revision ')} --repo-type {kind} --local-dir DIR, "
            "and copy DIR"
        )
    except (OSError, errors.HTTPError, errors.SafetensorsParsingError) as error:
        problem = f"{page}: {' '.join(str(error).split())}"
    else:
        return
    raise ValueError(f"{PREFIX}{named}: {problem}")
