"""The model card of an exported folder, README.md: what it began with, how it was trained and is loaded."""

import contextlib
from pathlib import Path
from typing import Any

import yaml

from megajax import hub
from megajax.config import Config, differences
from megajax.data.blend_file import prefixes, read_blend
from megajax.data.tokenizers.tokenizer import read_json
from megajax.training.reporting.metrics import read_metrics
from megajax.weights.hugging_face.adapter import is_adapter
from megajax.weights.hugging_face.adapter_export import base_folder

NAME = "ORG/NAME"
"""Stands in a card until it is uploaded."""
LICENCE = ("license", "license_name", "license_link")
SHOWN = ("task", "training", "optimizer", "precision", "lora", "mesh")
"""Sections of a config that a card has; the others name files of this machine."""
LOAD = """from transformers import AutoTokenizer, {model}

model = {model}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""
LOAD_ADAPTER = """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")"""


def write_card(folder: Path, run_dir: str | Path | None = None, step: int = 0) -> None:
    """Writes the card of a folder that was exported from a step of a run, unless it has one. run_dir: None: unknown."""
    if (folder / hub.CARD).exists():
        return
    head: dict[str, Any] = {"library_name": "peft" if is_adapter(folder) else "transformers", "tags": ["megajax"]}
    rows: dict[str, str] = {}
    recipe = ""
    if run_dir is not None:
        config = Config.load(run_dir, step)
        of_base, rows = _base(Path(run_dir), config)
        head |= of_base
        rows |= _training(Path(run_dir), config, step)
        recipe = "\n".join(line for section in SHOWN for line in _changed(config, section))
    load = LOAD_ADAPTER.format(name=NAME)
    if not is_adapter(folder):
        architecture = read_json(str(folder / "config.json"))["architectures"][0]
        rows |= {"architecture": architecture}
        load = LOAD.format(model=architecture, name=NAME)
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n# {NAME}",
        "Trained and exported with megajax.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]) if rows else "",
        f"## Load\n```python\n{load}\n```",
        f"With megajax: `megajax generate --run={hub.PREFIX}{NAME} --prompt='...'`, or `megajax train "
        f"--config={hub.PREFIX}{NAME}` to train it further.",
        f"## Recipe\nWhat differs from the defaults of megajax:\n```\n{recipe}\n```" if recipe else "",
    ]
    (folder / hub.CARD).write_text("\n\n".join(filter(None, parts)) + "\n")


def _base(run_dir: Path, config: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """Metadata and rows about the weights that the run began with."""
    folder = None
    with contextlib.suppress(ValueError):  # a run on the way is gone
        folder = base_folder(run_dir, config, is_frozen=False)
    if folder is None:
        return {}, {"begins with": "unknown weights"} if config.checkpoint.start_from else {}
    name = hub.name_of(folder)
    licence = {key: value for key, value in _metadata(folder).items() if key in LICENCE}
    known = licence.get("license_name") or licence.get("license") or "not known: see its card"
    rows = {"begins with": str(name or folder.name), "licence of these weights": str(known)}
    return licence | ({"base_model": name.repo} if name else {}), rows


def _metadata(folder: Path) -> dict[str, Any]:
    """The YAML at the beginning of a card; {} without one."""
    try:
        _, text, _ = (folder / hub.CARD).read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _training(run_dir: Path, config: Config, step: int) -> dict[str, str]:
    data, training = config.data, config.training
    named = prefixes(read_blend(data.paths)) if data.paths else data.text or (data.source,)
    record = read_json(str(run_dir / "data.json"))
    named = ("batches of a program",) if "batches" in record else named
    tokens = sum(file.get("tokens", 0) for file in record.get("files", []))
    lines = [line for _, line in read_metrics(run_dir / "metrics.jsonl") if line and line["step"] <= step]
    batch = f"{training.global_batch_size} sequences of {training.sequence_length:,} tokens"
    rows = {"data": ", ".join(Path(name).name for name in named) + (f" ({tokens:,} tokens)" if tokens else "")}
    rows |= {"training": f"{step:,} steps of {batch}"}
    for name, label in {"mean_loss": "training loss at the end", "eval_loss": "evaluation loss"}.items():
        found = [line for line in lines if line.get(name) is not None]
        rows |= {label: f"{found[-1][name]:.4f} (step {found[-1]['step']:,})"} if found else {}
    return rows


def _changed(config: Config, section: str) -> list[str]:
    """section.field=value of each field that is not at its default."""
    found = getattr(config, section)
    changes = (line.partition(": ") for line in differences(type(found)(), found, f"{section}."))
    return [f"{field}={change.rpartition(' -> ')[2]}" for field, _, change in changes]
