"""Pages of the site that are made from the code: the configuration and the recipes. MkDocs runs it as a hook."""

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import griffe
from mkdocs.structure.files import File, Files

import configs
from megajax.config import KINDS, Config
from megajax.fields.ranges import describe


def on_files(files: Files, config) -> Files:
    for path, text in (
        ("reference/configuration.md", configuration()),
        ("reference/recipes.md", recipes()),
    ):
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Files outside docs/ are no pages: their links become their paths."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({re.escape(up)}([^)]+)\)", r"\1 (`\2`)", markdown)


def configuration() -> str:
    """A table for each section, a row for each field."""
    lines = [
        "# Configuration",
        "",
        "Every field can be set on the command line as `--section.field=value`. The defaults are those of the classes; "
        "a recipe sets some of them, and `python train.py --config=NAME --help` shows its values.",
    ]
    whole = Config()
    for field in dataclasses.fields(Config):
        value = getattr(whole, field.name)
        if field.name in KINDS:
            for kind, chosen in sorted(KINDS[field.name].all().items()):
                lines += _section(f"{field.name} ({kind})", f"{field.name}.", chosen())
        elif dataclasses.is_dataclass(value):
            lines += _section(field.name, f"{field.name}.", value)
    return "\n".join([*lines, ""])


def _section(title: str, prefix: str, section: Any) -> list[str]:
    lines = ["", f"## {title}", ""]
    if prose := _docstring(type(section)):
        lines += [prose, ""]
    return [*lines, "| field | default | values | meaning |", "|---|---|---|---|", *_rows(prefix, section)]


def _rows(prefix: str, section: Any) -> list[str]:
    hints = get_type_hints(type(section), include_extras=True)
    meanings = _meanings(type(section))
    rows = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            rows += _rows(f"{prefix}{field.name}.", value)
            continue
        cells = (f"`{prefix}{field.name}`", f"`{_shown(value)}`", describe(hints[field.name]), meanings[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return rows


def _shown(value: Any) -> str:
    """As one types it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "()"
    return str(value) if value != "" else "''"


def _meanings(kind: type) -> dict[str, str]:
    """The docstring below each field, those of base classes included."""
    found = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            members = _module(base.__module__)[base.__qualname__].members
            found |= {name: member.docstring.value for name, member in members.items() if member.docstring}
    return found


def _docstring(kind: type) -> str:
    described = _module(kind.__module__)[kind.__qualname__].docstring
    return described.value if described else ""


_modules: dict[str, griffe.Object] = {}


def _module(name: str) -> griffe.Object:
    if name not in _modules:
        _modules[name] = griffe.load(name)
    return _modules[name]


def recipes() -> str:
    """What each recipe is, and what it says of itself."""
    lines = [
        "# Recipes",
        "",
        "A recipe is a Python function in `configs/` that returns the whole configuration: `--config=NAME`. Recipes "
        "that you add there are discovered automatically.",
        "",
        "| recipe | model | mesh | batch x sequence |",
        "|---|---|---|---|",
    ]
    details = []
    for name, recipe in configs.recipes().items():
        config = recipe()
        first, *rest = inspect.getdoc(recipe).split("\n")
        sizes = " x ".join(f"{axis} {size}" for axis, size in config.mesh.sizes().items() if size != 1) or "one device"
        training = config.training
        batch = f"{training.global_batch_size} x {training.sequence_length}"
        lines.append(f"| [`{name}`](#{name}) | {first} | {sizes} | {batch} |")
        details += ["", f"## {name}", "", first, *_paragraphs(rest)]
    return "\n".join([*lines, *details, ""])


def _paragraphs(lines: list[str]) -> list[str]:
    """Of a docstring: `Hardware: ...`, `Measured: ...` each begin one; what follows `Command:` is code."""
    shown = []
    for line in lines:
        if line.startswith("Command:"):
            shown += ["", "```", line.removeprefix("Command:").strip(), "```"]
        elif re.match(r"[A-Z]\w+:", line):
            label, text = line.split(":", 1)
            shown += ["", f"**{label}:**{text}"]
        else:
            shown.append(line)
    return shown
