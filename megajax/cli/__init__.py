"""The command line: megajax COMMAND [options]

Slow imports happen only when a command needs them.
"""

import faulthandler
import importlib
import os
import sys
from collections.abc import Callable

import megajax
from megajax.fields.suggestions import did_you_mean
from megajax.mesh.allocators import keep_freed_memory_without_gpu, use_gpu_memory
from megajax.terminal.one_line import print_error
from megajax.training.faults.signals import leave_when_asked, leave_when_interrupted

# Name -> (module whose main(arguments) runs it, words before its arguments, help).
COMMANDS = {
    "train": ("megajax.cli.train", (), "train a model, or resume a run"),
    "plan": ("megajax.cli.train", ("--plan",), "estimate memory, speed and cost of a run, without a GPU"),
    "configs": ("megajax.cli.train", ("--list_configs",), "list the recipes"),
    "generate": ("megajax.cli.infer", ("generate",), "continue prompts with a trained model"),
    "chat": ("megajax.cli.infer", ("chat",), "chat with a model in the terminal"),
    "serve": ("megajax.cli.infer", ("serve",), "serve a model over HTTP, with OpenAI's interface"),
    "bench": ("megajax.cli.infer", ("bench",), "measure the speed of a model or a server"),
    "fill": ("megajax.cli.infer", ("fill",), "the most likely tokens for each [MASK] of a text (BERT)"),
    "embed": ("megajax.cli.infer", ("embed",), "a vector for each text (BERT)"),
    "classify": ("megajax.cli.infer", ("classify",), "the class of each text, or of its words (BERT)"),
    "evaluate": ("megajax.evaluation.__main__", (), "perplexity, LAMBADA, WikiText and lm-eval of a model"),
    "preprocess": ("megajax.data.preprocess", (), "convert text to tokens on disk"),
    "retrieve": ("megajax.retrieval.__main__", (), "build and query a database of neighbours of text (Retro)"),
    "inspect": ("megajax.data.inspect", (), "inspect tokens on disk"),
    "export": ("megajax.convert.export", (), "write only the parameters of a run, for serving"),
    "quantize": ("megajax.quantization.__main__", (), "calibrate a run and write it in 8 bits for vLLM"),
    "plot": ("megajax.figures.plot", (), "plot curves of runs"),
    "hugging_face": ("megajax.convert.hugging_face", (), "import and export Hugging Face folders"),
    "push": ("megajax.convert.push", (), "upload a run or an exported folder to the Hugging Face hub"),
    "megatron": ("megajax.convert.megatron", (), "import Megatron Core checkpoints"),
    "doctor": ("megajax.cli.doctor", (), "devices, versions and speed of this machine, for bug reports"),
    "completion": ("megajax.cli.completion", (), "print a shell completion script: megajax completion bash"),
}


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h"):
        print(usage())
        raise SystemExit(0 if arguments else 2)
    name = arguments[0]
    if name == "--version":
        print(f"megajax {megajax.__version__}")
        return
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "; megajax --help lists all commands"
        print_error(ValueError(f"megajax {name} is unknown{hint}"))
        raise SystemExit(2)
    if name == "train":
        keep_freed_memory_without_gpu()
        leave_when_asked()  # also during the imports, which take seconds
    module, words, _ = COMMANDS[name]
    if module == "megajax.cli.infer":
        leave_when_interrupted()
    command = importlib.import_module(module).main
    run_command(command, [*words, *arguments[1:]], trains=name == "train")


def usage() -> str:
    lines = [f"  {name:<12} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: megajax COMMAND [options]", "", *lines, "", "--help after a command shows its options; --version."]
    )


def run_command(command: Callable[[list[str]], None], arguments: list[str], *, trains: bool = False) -> None:
    """Ends the program with one line and exit status 2 for bad input, with 130 after ctrl-C. trains: continue even if
    nothing can be printed any more."""
    from megajax.training.reporting.best_effort import print_what_can_be_printed
    from megajax.training.reporting.console import log_to_stderr

    if trains and not {"--help", "-h"}.intersection(arguments):
        print_what_can_be_printed()
    log_to_stderr()
    use_gpu_memory()
    faulthandler.enable(file=2)  # a bus error, as of a mapped file that is cut off, would be silent
    try:
        command(arguments)
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # as in --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
