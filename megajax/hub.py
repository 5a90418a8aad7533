"""Names of the Hugging Face hub: huggingface_hub downloads, and its own settings hold (HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE)."""

import contextlib
import functools
import re
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

PREFIX = "hugging_face:"
"""Before the path of a folder, or the name of what the hub has."""
CARD = "README.md"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")
MODEL_FILES = ("*.safetensors", CARD, *TOKENIZER_FILES)
OTHER_FILES = ["*/*", "consolidated*"]  # other formats in folders of their own, and a second copy of Mistral's weights


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
    return named if named == text or Path(named).is_dir() else _downloaded(named, files)


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
    except (OSError, errors.HTTPError) as error:
        problem = f"{page}: {' '.join(str(error).split())}"
    else:
        return
    raise ValueError(f"{PREFIX}{named}: {problem}")
