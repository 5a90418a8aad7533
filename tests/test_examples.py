"""Every example of README and docs runs as it is written, page by page, on runs of a few steps.

A page runs in a folder of its own with runs/gpt_tiny, runs/t5_tiny and the files that examples name; the recipes are as
small as `TINY` makes them, and so is the engine. An HTML comment before an example, which a reader does not see, says
why it does not run here, `<!-- not run: REASON -->`, or that it runs with `-m slow` only, `<!-- slow -->`.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import configs
import megajax
from megajax import library
from megajax.cli import COMMANDS
from megajax.cli.serving import Serve
from megajax.data.tokenizers.chat_template import find_chat_template
from megajax.inference.engine import Engine, ServingConfig
from megajax.terminal.command_line import parse
from servers import serving, wait_until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (not run: [^\n]+|slow) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"(python|megajax|curl|pip|sbatch|lm_eval|docker|pytest|[A-Z_]+=\S*) ")
SERVER = "127.0.0.1:8000"
# In place of what recipes for a laptop say, which takes them minutes.
TINY = {
    "model.num_layers": 4,
    "model.embed_dim": 32,
    "model.num_heads": 2,
    "model.vocab_size": 512,
    "data.text": "texts",
    "training.steps": 4,
    "training.sequence_length": 32,
    "training.global_batch_size": 8,
    "training.eval_every_steps": 50,
    "training.eval_steps": 1,
    "checkpoint.every_steps": 50,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 1,
    "logging.tensorboard": False,
}
SMALL = dict(max_rows=8, max_batch_tokens=32, page_size=64, num_pages=32, max_length=256, decode_steps=2)
recipe_as_written = configs.recipe


@dataclasses.dataclass(frozen=True)
class Example:
    page: str
    number: int
    mark: str
    """What the comment before it says, or nothing."""
    is_python: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page}, example {self.number}"


def examples(page: Path) -> list[Example]:
    """Of Python and of commands; other blocks show files or what is printed."""
    name = str(page.relative_to(ROOT))
    found = []
    for mark, language, text in BLOCK.findall(page.read_text()):
        if language in ("python", "bash") or (not language and SHELL.match(text)):
            found.append(Example(name, len(found), mark, language == "python", text))
        else:
            assert not mark, f"{name}: the comment {mark} stands before something that is no example"
    return found


EXAMPLES = {str(page.relative_to(ROOT)): examples(page) for page in PAGES}
EXAMPLES = {name: found for name, found in EXAMPLES.items() if found}


def tiny_recipe(name: str):
    config = recipe_as_written(name)
    if not name.endswith("_tiny"):
        return config
    tokenizer = {} if config.data.tokenizer == "bytes" else {"data.tokenizer": "sentencepiece:400"}
    return megajax.override(config, TINY | tokenizer)


@pytest.fixture(scope="module")
def tiny():
    """Recipes and engines are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "recipe", tiny_recipe)
        patch.setattr(library, "Engine", functools.partial(Engine, serving=ServingConfig(**SMALL)))
        open_engine = Engine.from_run

        def small(run_dir, mesh=None, step=None, serving=None, draft_run=None):
            given = serving or ServingConfig()
            return open_engine(run_dir, mesh, step, dataclasses.replace(given, **SMALL), draft_run)

        patch.setattr(Engine, "from_run", small)
        yield


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """With what the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("docs", "megajax", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number}.py").write_text(
            (ROOT / "megajax/parameters.py").read_text()[:4000] + str(number)
        )
    (folder / "held_out.txt").write_text("def f(x):\n    return x\n")
    (folder / "prompts.txt").write_text("def \nclass \n")
    with contextlib.chdir(folder):
        for name in ("gpt_tiny", "t5_tiny"):
            assert megajax.Run(megajax.recipe(name)).train() == "finished"
    shutil.copytree(folder / "runs/gpt_tiny", folder / "runs/a")
    return folder


class Page:
    """Runs the examples of a page in turn, which share variables, files and the server."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self._patch = stack.enter_context(pytest.MonkeyPatch.context())
        self._variables = {"__name__": "example"}
        self._address = SERVER

    def run(self, example: Example) -> None:
        text = example.text.replace(SERVER, self._address)
        if example.is_python:
            exec(compile(text, str(example), "exec"), self._variables)
            return
        for line in text.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                words = shlex.split(os.path.expandvars(command), comments=True)
                words = [word for word in words if not word.startswith("--launch.cpu_devices=")]  # there are eight
                if len(words) == 1 and "=" in words[0]:
                    name, _, value = words[0].partition("=")
                    self._patch.setenv(name, value)
                elif words:
                    self._run_command(words)

    def _run_command(self, words: list[str]) -> None:
        if words[0] == "curl":
            subprocess.run(["curl", "--fail-with-body", "--no-progress-meter", *words[1:]], check=True, timeout=60)
            return
        module, arguments = self._command(words)
        if "serve" in arguments[:1]:
            self._serve(arguments[1:])
            return
        self._patch.setattr("sys.stdin", io.StringIO())  # for a chat
        try:
            importlib.import_module(module).main(arguments)
        except SystemExit as end:
            assert not end.code, f"{' '.join(words)} ended with {end.code}"

    def _command(self, words: list[str]) -> tuple[str, list[str]]:
        """(module whose main takes the arguments, arguments)."""
        if words[:3] == ["python", "-m", "megajax"]:
            words = words[2:]
        if words[0] == "megajax":
            module, first, _ = COMMANDS[words[1]]
            return module, [*first, *words[2:]]
        assert words[0] == "python", words
        if words[1] == "-m":
            is_package = importlib.util.find_spec(words[2]).submodule_search_locations is not None
            return words[2] + ".__main__" * is_package, words[3:]
        return {"train.py": "megajax.cli.train", "infer.py": "megajax.cli.infer"}[words[1]], words[2:]

    def _serve(self, options: list[str]) -> None:
        given = parse(Serve, options, "infer.py serve")
        engine = Engine.from_run(given.run)
        template = find_chat_template(engine.tokenizer, given.chat_template)
        name = Path(given.run).name
        url = self._stack.enter_context(serving(engine, template=template, model_name=name, run=given.run))
        self._address = url.removeprefix("http://")
        wait_until(lambda: subprocess.run(["curl", "-sf", f"{url}/health"], capture_output=True).returncode == 0)


def run_page(name: str, folder: Path, tmp_path: Path, with_slow: bool) -> None:
    shutil.copytree(folder, tmp_path / "page", symlinks=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(tmp_path / "page"))
        page = Page(stack)
        for example in EXAMPLES[name]:
            if not example.mark or (example.mark == "slow" and with_slow):
                page.run(example)


@pytest.mark.parametrize("name", [name for name, found in EXAMPLES.items() if any(not each.mark for each in found)])
def test_examples_run_as_written(name, folder, tmp_path):
    run_page(name, folder, tmp_path, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, found in EXAMPLES.items() if any(each.mark == "slow" for each in found)])
def test_examples_that_take_longer_run_as_written(name, folder, tmp_path):
    run_page(name, folder, tmp_path, with_slow=True)


@pytest.mark.parametrize(
    "example", [each for found in EXAMPLES.values() for each in found if each.mark[:3] == "not"], ids=str
)
def test_example_that_cannot_run_here(example):
    pytest.skip(example.mark)
