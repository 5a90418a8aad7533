"""What README and docs say that can be compared with the code: names of fields, recipes and files."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import configs
import megajax
from megajax.config import Config
from megajax.models.interface import MODELS
from megajax.tasks.interface import TASKS

ROOT = Path(__file__).parents[1]
OF_GITHUB = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = [*OF_GITHUB, *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = "|".join(field.name for field in dataclasses.fields(Config) if field.name != "run_dir")


def names_of_fields(config, prefix: str = "") -> set[str]:
    """Of all fields and, since pages name them too, of the sections."""
    names = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names.add(prefix + field.name)
        if dataclasses.is_dataclass(value):
            names |= names_of_fields(value, f"{prefix}{field.name}.")
    return names


def known_fields() -> set[str]:
    """Of the configs of all families of models and of all tasks."""
    models = [Config(model=family()) for family in MODELS.all().values()]
    return set().union(*map(names_of_fields, [*models, *(Config(task=task()) for task in TASKS.all().values())]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_fields_recipes_and_files_that_exist(page):
    text = page.read_text()
    named = set(re.findall(rf"--((?:{SECTIONS})(?:\.\w+)+)", text))
    for quoted in re.findall(r"`([^`\n]*)`", text):
        named |= set(re.findall(rf"(?:^|(?<=[\s-]))((?:{SECTIONS})(?:\.\w+)+)", quoted))
    files = {name for name in named if name.endswith((".py", ".json"))}
    assert sorted(named - files - known_fields()) == []
    recipes = set(re.findall(r"--config=(\w+)(?!\w*(?::|\.\w))", text)) - {"NAME"}
    assert sorted(recipes - set(configs.recipes())) == []
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    generated = [link for link in links if "reference/" in link]
    assert [link for link in links if link not in generated and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES[len(OF_GITHUB) :], ids=lambda page: str(page.relative_to(ROOT)))
def test_list_follows_an_empty_line(page):
    """Otherwise the site shows it as part of the paragraph before it; GitHub does not."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    item = r"(?:- |\d+\. )"
    assert re.findall(rf"^(?!{item}|  ).+\n{item}.*", text, flags=re.MULTILINE) == []


def test_the_map_of_the_code_names_what_exists():
    """`file.py:name`, relative to megajax/ or to the root; and every folder of megajax/ is in the table of rooms."""
    text = (ROOT / "docs/design.md").read_text()
    named = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        path = next(path for path in (ROOT / "megajax" / file, ROOT / file) if path.is_file())
        defined = rf"^(?:class|def) {name}\b|^{name}\b|import .*\b{name}\b"
        assert re.search(defined, path.read_text(), re.MULTILINE), file
    rooms = {path.parent.name for path in (ROOT / "megajax").glob("*/__init__.py")}
    assert sorted(room for room in rooms if f"`{room}/`" not in text) == []


def test_readme_names_the_version_and_what_it_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax,) = [re.search(r"[\d.]+", name)[0] for name in project["dependencies"] if name.startswith("jax>=")]
    python = project["requires-python"].removeprefix(">=")
    line = f"Version {megajax.__version__} · Python {python} or newer · JAX {jax} or newer · Apache License 2.0"
    assert line in (ROOT / "README.md").read_text().splitlines()


def test_troubleshooting_quotes_messages_of_the_code():
    """Parts between ... and values; those of JAX and the system are not ours."""
    ours = set()
    for path in [*(ROOT / "megajax").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                ours.add(node.value)
    said = "\n".join(ours)
    others = "An NVIDIA GPU", "Unable to initialize", "RESOURCE_EXHAUSTED", "Killed"
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        text for cell in re.findall(r"^\|([^|]+)\|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", cell)
    ]
    parts = [part.strip() for text in quoted if not text.startswith(others) for part in re.split(r"\.\.\.|=|\d+", text)]
    missing = [part for part in parts if " " in part and part not in said]
    assert missing == []
    assert len(parts) > 20
