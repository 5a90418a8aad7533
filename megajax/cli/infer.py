"""Use a trained model: infer.py {generate,chat,bench,serve} --run=DIR [options], or megajax {generate,chat,bench}

  generate  continues each --prompt="..." and prints it
  chat      chat in the terminal: every line continues the text so far; an empty line or ctrl-D ends it
  bench     measures prefill and decode speed for each batch size
  serve     an HTTP server; not implemented yet

--help after a command shows its options. --mesh.tensor=2 (or another axis of the mesh) spreads the model over devices.
"""

import argparse
import dataclasses
import sys
from typing import NoReturn

from megajax.suggestions import did_you_mean


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.command == "serve":
        raise ValueError("serve: the HTTP server is not implemented yet; use infer.py generate or infer.py chat")
    {"generate": generate, "chat": chat, "bench": bench}[options.command](options)


def generate(options: argparse.Namespace) -> None:
    sampling = _sampling(options)
    texts = _engine(options).generate(options.prompt, sampling)
    for number, (prompt, text) in enumerate(zip(options.prompt, texts, strict=True), 1):
        if len(texts) > 1:
            print(f"{chr(10) * (number > 1)}--- {number} of {len(texts)}")
        print(prompt + text)


def chat(options: argparse.Namespace) -> None:
    """The conversation is plain text without a template: the input, a newline, the output of the model."""
    sampling = _sampling(options)
    engine = _engine(options)
    room = engine.room_for_prompt(sampling.max_tokens)
    if room < 1:
        most = sampling.max_tokens + room - 1
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves no room for a prompt; use at most {most}")
    context = ""
    while line := _read_line():
        context += line + "\n"
        tokens = engine.encode(context)
        if len(tokens) > room:
            context = engine.tokenizer.decode(tokens[-room:])
            print("(the beginning of the conversation no longer fits and is forgotten)", file=sys.stderr)
        (text,) = engine.generate([context], sampling)
        print(text)
        context += text + "\n"


def bench(options: argparse.Namespace) -> None:
    from megajax.inference.benchmark import measure, table

    for batch_size in options.batch:
        if batch_size < 1:
            raise ValueError(f"batch={batch_size} must be at least 1")
    if options.prompt_tokens < 1 or options.repeats < 1:
        raise ValueError(f"prompt_tokens={options.prompt_tokens} and repeats={options.repeats} must be at least 1")
    engine = _engine(options)
    device = engine.mesh.devices.flat[0].device_kind
    print(f"{options.run} on {engine.mesh.size} x {device}: {engine.model.num_parameters():,} parameters, "
          f"{options.prompt_tokens} prompt tokens, {options.max_tokens} new tokens per row")  # fmt: skip
    sizes = (options.prompt_tokens, options.max_tokens, options.repeats)
    print(table([measure(engine, batch_size, *sizes) for batch_size in options.batch]))


def _engine(options: argparse.Namespace):
    from megajax.inference.engine import Engine
    from megajax.mesh import AXES, MeshConfig, use_compilation_cache, use_cpu_devices

    if number := getattr(options, "launch.cpu_devices"):
        use_cpu_devices(number)
    mesh = MeshConfig(**{axis: getattr(options, f"mesh.{axis}") for axis in AXES})
    engine = Engine.from_run(options.run, mesh, options.step)
    use_compilation_cache()
    return engine


def _sampling(options: argparse.Namespace):
    from megajax.inference.sampling import Sampling

    names = {field.name for field in dataclasses.fields(Sampling)} & set(vars(options))
    fields = {name: getattr(options, name) for name in names}
    sampling = Sampling(**fields | {"stop": tuple(options.stop)})
    sampling.check()
    return sampling


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return ""


# ----------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{generate,chat,bench,serve}")
    generate = _add_command(commands, "generate", "continue prompts")
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    _add_sampling(generate)
    _add_sampling(_add_command(commands, "chat", "chat in the terminal"))
    bench = _add_command(commands, "bench", "measure the speed")
    bench.add_argument("--batch", type=_numbers, default=[1, 8], help="batch sizes, separated by commas (1,8)")
    bench.add_argument("--prompt_tokens", type=int, default=128, help="tokens of each prompt (128)")
    bench.add_argument("--max_tokens", type=int, default=64, help="tokens to generate per row (64)")
    bench.add_argument("--repeats", type=int, default=3, help="measured generations; the median is shown (3)")
    commands.add_parser("serve", help="not implemented yet", add_help=False)
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.command != "serve":
        known = [name for name in vars(options) if name != "command"]
        typed = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        parser.error(f"{unknown[0]} is unknown{did_you_mean(typed, known, '--')}")
    if options.command != "serve" and vars(options)["launch.cpu_devices"] < 0:
        raise ValueError(f"launch.cpu_devices={vars(options)['launch.cpu_devices']} must be at least 0")
    return options


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, separated by commas") from None


def _add_command(commands, name: str, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help, allow_abbrev=False)
    command.add_argument("--run", required=True, help="directory of a run (runs/NAME)")
    command.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    for axis in ("data", "fsdp", "expert", "context", "tensor", "pipeline"):
        command.add_argument(f"--mesh.{axis}", type=int, default=1, help="devices on this axis (1); -1: the rest")
    command.add_argument(
        "--launch.cpu_devices",
        type=int,
        default=0,
        help="number of virtual CPU devices to try a mesh on; 0: use the real devices (0)",
    )
    return command


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max_tokens", type=int, default=128, help="maximum number of tokens to generate (128)")
    command.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (1.0)")
    command.add_argument("--top_k", type=int, default=0, help="sample from the k most likely tokens; 0: all (0)")
    command.add_argument(
        "--top_p", type=float, default=1.0, help="sample from the nucleus of this probability; 1: all (1.0)"
    )
    command.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (0)")
    command.add_argument("--stop", action="append", default=[], help="text that ends the generation; may be repeated")
