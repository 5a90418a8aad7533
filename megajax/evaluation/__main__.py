"""Evaluates a model: python -m megajax.evaluation {perplexity,lambada,wikitext,lm_eval} --run=DIR [options]

  perplexity  perplexity and bits per byte of text or .bin/.idx files: --text=FILE ... --tokens=PREFIX ...
  lambada     how often the last word of a passage is predicted: --data=FILE.jsonl [--strict]
  wikitext    perplexity per token and per word of a file of WikiText: --data=FILE
  lm_eval     tasks of lm-eval: --tasks=NAME,NAME; needs pip install 'megajax[evaluation]'

DIR is a run or a Hugging Face folder. Prints a JSON object. --watch evaluates all checkpoints of a run, also those that
are still to come, and writes to DIR/evaluations.jsonl (docs/evaluation.md). --mesh.tensor=2, or another axis, spreads
the model over devices. `megajax evaluate` is the same command.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from megajax.data.indexed.dataset import prefix_of
from megajax.evaluation.perplexity import Totals, check_files, perplexity
from megajax.evaluation.scorer import BATCH_TOKENS
from megajax.evaluation.text_model import TextModel
from megajax.evaluation.watch import to_json, watch
from megajax.evaluation.zero_shot import lambada, wikitext
from megajax.inference.config import WeightDtype
from megajax.mesh.config import MeshConfig
from megajax.mesh.processes import use_compilation_cache
from megajax.terminal.command_line import Parser, add_mesh_options, errors_in_one_line, mesh_of
from megajax.training.reporting.console import log_to_stderr
from megajax.weights.hugging_face.folder import is_folder

Task = Callable[[TextModel], dict[str, Any]]
LIMIT = "evaluate only the first N"


def main(arguments: Sequence[str] | None = None) -> None:
    log_to_stderr()
    with errors_in_one_line():
        _run(_parse(arguments))


def _run(options: argparse.Namespace) -> None:
    task = TASKS[options.command](options)
    if options.watch and (is_folder(options.run) or options.step is not None):
        raise ValueError("--watch evaluates every step of a run: give it the directory of a run, and no --step")
    mesh = mesh_of(options)
    use_compilation_cache()
    about = {"task": options.command, "settings": _settings(options)}
    if not options.watch:
        model = _load(options, mesh, options.step)
        print(to_json({"step": getattr(model.source, "step", None), **about, "results": task(model)}, indent=2))
        return
    model = None

    def evaluate(step: int) -> dict[str, Any]:
        nonlocal model
        if model is None:
            model = _load(options, mesh, step)
        else:
            model.use_step(step)
        return task(model)

    for record in watch(options.run, about, evaluate):
        print(to_json(record), flush=True)


def _load(options: argparse.Namespace, mesh: MeshConfig, step: int | None) -> TextModel:
    compute = getattr(options, "precision.compute")
    sizes = dict(max_length=options.max_length, batch_tokens=options.batch_tokens)
    return TextModel.load(options.run, mesh, step, compute, options.weight_dtype, **sizes)


# ----------------------------------------------------------------------------- tasks


def _perplexity(options: argparse.Namespace) -> Task:
    if not options.text and not options.tokens:
        raise ValueError("perplexity: name files with --text=FILE ... or --tokens=PREFIX ...")
    check_files(options.text, options.tokens)

    def task(model: TextModel) -> dict[str, Any]:
        found = perplexity(model, options.text, options.tokens, overlap=options.overlap, limit=options.limit)
        results = {name: totals.metrics() for name, totals in found.items()}
        return results if len(found) == 1 else results | {"all": sum(found.values(), Totals()).metrics()}

    return task


def _lambada(options: argparse.Namespace) -> Task:
    _check_data(options.data)
    return lambda model: lambada(model, options.data, strict=options.strict, limit=options.limit)


def _wikitext(options: argparse.Namespace) -> Task:
    _check_data(options.data)
    return lambda model: wikitext(model, options.data, overlap=options.overlap)


def _lm_eval(options: argparse.Namespace) -> Task:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval needs the package lm-eval; pip install 'megajax[evaluation]'")
    from megajax.evaluation.harness import check_tasks, evaluate

    tasks = options.tasks.split(",")
    check_tasks(tasks, options.include_path)
    names = ("num_fewshot", "limit", "include_path", "apply_chat_template")
    return lambda model: evaluate(model, tasks, **{name: getattr(options, name) for name in names})


TASKS = {"perplexity": _perplexity, "lambada": _lambada, "wikitext": _wikitext, "lm_eval": _lm_eval}


def _check_data(path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"data={path}: the file does not exist")


# ----------------------------------------------------------------------------- command line


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What determines the results besides the weights."""
    others = {"command", "run", "step", "watch", "batch_tokens"}
    if options.weight_dtype == "auto":
        others.add("weight_dtype")  # earlier records do not have it
    return {
        name: value
        for name, value in vars(options).items()
        if name not in others and not name.startswith(("mesh.", "launch."))
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="megajax evaluate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(TASKS) + "}")
    command = _add_command(commands, "perplexity", "perplexity and bits per byte of files")
    command.add_argument("--text", nargs="+", default=[], help="text, .jsonl or .parquet files, also .gz or .zst")
    command.add_argument("--tokens", nargs="+", type=prefix_of, default=[], help="prefixes of .bin and .idx files")
    command.add_argument("--overlap", type=int, help="tokens that consecutive windows share (half of max_length)")
    command.add_argument("--limit", type=int, help=f"{LIMIT} documents of each file")
    command = _add_command(commands, "lambada", "last words of passages, as Megatron's LAMBADA task")
    command.add_argument("--data", required=True, help="file of JSON lines with a field text")
    command.add_argument("--strict", action="store_true", help="the whole last word, instead of the last token")
    command.add_argument("--limit", type=int, help=f"{LIMIT} passages")
    command = _add_command(commands, "wikitext", "perplexity per word, as Megatron's WIKITEXT103 task")
    command.add_argument("--data", required=True, help="a file of WikiText, with spaces around punctuation")
    command.add_argument("--overlap", type=int, help="tokens that consecutive windows share (0)")
    command = _add_command(commands, "lm_eval", "tasks of lm-eval")
    command.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    command.add_argument("--num_fewshot", type=int, help="examples before each question (as the task says)")
    command.add_argument("--limit", type=int, help=f"{LIMIT} examples of each task")
    command.add_argument("--include_path", help="folder with further tasks")
    command.add_argument("--apply_chat_template", action="store_true", help="ask as a user in a conversation")
    return parser.parse_args(arguments)


def _add_command(commands, name: str, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help)
    command.add_argument("--run", required=True, help="directory of a run, or a Hugging Face folder")
    command.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    command.add_argument("--watch", action="store_true", help="all steps of the run, and new ones until its end")
    command.add_argument("--max_length", type=int, help="tokens that are read at once (training.sequence_length)")
    command.add_argument(
        "--batch_tokens", type=int, default=BATCH_TOKENS, help=f"tokens of a batch, over all devices ({BATCH_TOKENS})"
    )
    formats = ("float32", "bfloat16")
    command.add_argument("--precision.compute", choices=formats, help="format of activations; default: as in the run")
    weights = get_args(WeightDtype)
    command.add_argument("--weight_dtype", choices=weights, default="auto", help="as of infer.py (auto)")
    add_mesh_options(command)
    return command


if __name__ == "__main__":
    main()
