"""Use a trained model: infer.py COMMAND --run=DIR [options]

  generate  continues each --prompt="..." and prints it; a model with an encoder
            writes its answer
  chat      a conversation in the terminal; an empty line or ctrl-D ends it,
            ctrl-C ends an answer
  serve     an HTTP server with OpenAI's interface, and a page to chat with the
            model
  bench     measures prefill and decode speed, or latency and throughput under
            load, here or of a server
  fill      the most likely tokens for each [MASK] of --text="..." (BERT)
  embed     a vector for each text (BERT)
  classify  the class of each text, or of its words (BERT with a classification
            head)

--help after a command shows its options. --mesh.tensor=2 (or another axis of
the mesh) spreads the model over devices.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import secrets
import signal
import sys
from pathlib import Path

from megajax.terminal.command_line import Parser, add_mesh_options, mesh_of

logger = logging.getLogger("megajax")


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text == "True"


MOST = 1_000_000  # tokens, requests, rows or repetitions of bench
# Fields of ServingConfig, which is slow to import: (type, help).
SERVING = {
    "max_rows": (int, "sequences that are decoded at the same time (256; on a CPU 16)"),
    "max_batch_tokens": (int, "prompt tokens per call of the device; longer prompts are split (8192; on a CPU 256)"),
    "max_length": (int, "maximum tokens of a sequence, prompt included; default: what the model supports, or 8192"),
    "page_size": (int, "tokens per page of keys and values (64)"),
    "num_pages": (int, "pages; default: as many as memory_fraction allows"),
    "memory_fraction": (float, "fraction of the device memory for weights and pages (0.9)"),
    "page_dtype": (str, "keys and values are stored as compute, int8 or float8 (compute)"),
    "weight_dtype": (str, "matrices of layers are stored as compute, int8, float8 or auto: as in the folder (auto)"),
    "prefix_cache": (_truth, "False: keep nothing of finished requests for prompts that begin the same way (True)"),
    "decode_steps": (int, "tokens per sequence and call of the device (4)"),
    "draft_tokens": (
        int,
        "speculative decoding: guesses per sequence and step, by --draft_method or --draft_run; 0: off (0)",
    ),
    "draft_method": (str, "what guesses: lookup, the text itself; mtp, the model's multi-token prediction (lookup)"),
}


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    encoder = dict.fromkeys(("fill", "embed", "classify"), encode)
    commands = {"generate": generate, "chat": chat, "bench": bench, "serve": serve} | encoder
    commands[options.command](options)


def generate(options: argparse.Namespace) -> None:
    from megajax.cli.generation import print_texts, read_prompts, write_records
    from megajax.weights.sources import open_source

    sampling = _sampling(options)
    if (options.prompts is None) == (not options.prompt):
        raise ValueError("give --prompt, which may be repeated, or --prompts=FILE")
    prompts = read_prompts(options.prompts) if options.prompts else options.prompt
    if options.output is not None and Path(options.output).exists():
        raise ValueError(f"output={options.output} exists; give a new file")
    _serving(options)  # an error in the settings comes before anything is opened
    mesh_of(options)
    source = open_source(options.run, options.step)
    _say_seed(options, sampling)
    if source.config.model.reads_source:
        _write_from_source(options, prompts, sampling)
        return
    if options.num_beams != 1:
        raise ValueError(f"num_beams={options.num_beams} is for models with an encoder; leave it out")
    engine = _engine(options)
    if options.output is None:
        print_texts(engine, prompts, sampling)
    elif options.output == "-":
        write_records(engine, prompts, sampling, sys.stdout)
    else:
        with open(options.output, "x", encoding="utf-8") as file:
            write_records(engine, prompts, sampling, file)


def _write_from_source(options: argparse.Namespace, prompts: list[str], sampling) -> None:
    """generate, for a model that reads a text and writes another."""
    from megajax.cli.generation import print_written
    from megajax.inference.load import open_model
    from megajax.inference.sequence_to_sequence import SequenceToSequence
    from megajax.mesh.processes import use_compilation_cache

    given = [name for name in (*SERVING, "draft_run") if getattr(options, name) is not None]
    if given:
        raise ValueError(
            f"{given[0]}={getattr(options, given[0])} is for the engine, which does not run models with an encoder; "
            "leave it out"
        )
    model = SequenceToSequence(open_model(options.run, mesh_of(options), options.step))
    use_compilation_cache()
    written = model.write(prompts, sampling, options.num_beams)
    with contextlib.ExitStack() as stack:
        file = None
        if options.output is not None:
            is_new = options.output != "-"
            file = stack.enter_context(open(options.output, "x", encoding="utf-8")) if is_new else sys.stdout
        print_written(prompts, written, file)


def chat(options: argparse.Namespace) -> None:
    from megajax.cli.generation import PlainConversation, TemplatedConversation
    from megajax.cli.generation import chat as converse

    sampling = _sampling(options)
    _check_template(options)
    engine = _engine(options)
    _say_seed(options, sampling)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on ctrl-C ends an answer
    template = _template(engine, options)
    room = engine.room_for_prompt(sampling.max_tokens)
    if room < 1:
        most = sampling.max_tokens + room - 1
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves no room for a prompt; use at most {most}")
    if template is not None:
        converse(engine, TemplatedConversation(engine, template, room, options.system), sampling)
        return
    if options.system:
        raise ValueError(f"system={options.system!r} needs a chat template, which {options.run} has not; "
                         "use --chat_template=FILE")  # fmt: skip
    print("(the model has no chat template: it continues the text of the conversation)", file=sys.stderr)
    converse(engine, PlainConversation(engine, room), sampling)


def serve(options: argparse.Namespace) -> None:
    from megajax.cli import serving

    serving.need_packages("infer.py serve")
    from megajax.inference.server.app import ServerConfig
    from megajax.inference.tokens.sampling import recommended_sampling

    named = ("run", "host", "port", "max_requests", "request_timeout_seconds", "allow_load", "log_requests")
    config = ServerConfig(
        model_name=options.model_name or Path(options.run).resolve().name,
        api_keys=serving.read_keys(options.api_key, options.api_key_file),
        sampling=recommended_sampling(options.run),
        **{name: getattr(options, name) for name in named},
    )
    config.check()
    _check_template(options)
    with contextlib.closing(serving.bind(config.host, config.port)) as bound:
        engines = _engines(options)
        serving.serve(engines, config, _template(engines[0], options), bound)


def encode(options: argparse.Namespace) -> None:
    from megajax.cli.encoding import classified, embedded, filled, read_texts
    from megajax.inference.load import open_model
    from megajax.inference.text_encoder import TextEncoder
    from megajax.mesh.processes import use_compilation_cache

    if (options.texts is None) == (not options.text):
        raise ValueError("give --text, which may be repeated, or --texts=FILE")
    if options.output is not None and Path(options.output).exists():
        raise ValueError(f"output={options.output} exists; give a new file")
    if options.command == "fill" and options.top_k < 1:
        raise ValueError(f"top_k={options.top_k} must be at least 1")
    records = read_texts(options.texts) if options.texts else [{"text": text} for text in options.text]
    encoder = TextEncoder(open_model(options.run, mesh_of(options), options.step))
    use_compilation_cache()
    if options.command == "fill":
        found = filled(encoder, records, options.top_k)
    elif options.command == "embed":
        found = embedded(encoder, records, options.pooling)
    else:
        found = classified(encoder, records)
    lines = [json.dumps(record, ensure_ascii=False) for record in found]
    if options.output is None:
        print("\n".join(lines))
    else:
        Path(options.output).write_text("\n".join(lines) + "\n")


def bench(options: argparse.Namespace) -> None:
    _check_bench(options)
    if options.request_rate or options.concurrency:
        _bench_traffic(options)
        return
    from megajax.inference.benchmark import measure, table

    engine = _engine(options)
    device = engine.mesh.devices.flat[0].device_kind
    print(f"{options.run} on {engine.mesh.size} x {device}: {engine.model.num_parameters():,} parameters, "
          f"{options.prompt_tokens} prompt tokens, {options.max_tokens} new tokens per row")  # fmt: skip
    sizes = (options.prompt_tokens, options.max_tokens, options.repeats)
    print(table([measure(engine, batch_size, *sizes) for batch_size in options.batch]))


def _check_bench(options: argparse.Namespace) -> None:
    if (options.run is None) == (options.url is None):
        raise ValueError("give --run=DIR, or --url=http://HOST:PORT of a server")
    if options.url is not None and not (options.request_rate or options.concurrency):
        raise ValueError("--url needs --request_rate=1,4,16 (requests per second) or --concurrency=1,8,64")
    for name in ("batch", "concurrency"):
        for number in getattr(options, name):
            if not 1 <= number <= MOST:
                raise ValueError(f"{name}={number} must be from 1 to {MOST}")
    for rate in options.request_rate:
        if not rate > 0:
            raise ValueError(f"request_rate={rate} must be above 0; inf sends all requests at once")
    for name in ("prompt_tokens", "repeats", "num_requests", "max_tokens"):
        if not 1 <= getattr(options, name) <= MOST:
            raise ValueError(f"{name}={getattr(options, name)} must be from 1 to {MOST}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed={options.seed} must be from 0 to 2**32 - 1")


def _bench_traffic(options: argparse.Namespace) -> None:
    from megajax.cli import serving

    serving.need_packages("infer.py bench with --request_rate or --concurrency")
    from megajax.inference.traffic import Load, Workload

    loads = [Load(request_rate=rate) for rate in options.request_rate]
    loads += [Load(concurrency=number) for number in options.concurrency]
    workload = Workload(options.num_requests, options.prompt_tokens, options.max_tokens, options.seed)
    if options.url is not None:
        results = serving.bench_server(options.url, options.api_key, loads, workload)
    else:
        results = serving.bench_engine(_engine(options), loads, workload)
    serving.report(results, options.json, options.figure)


def _engine(options: argparse.Namespace):
    from megajax.inference.engine import Engine

    return _open(Engine.from_run, options)


def _engines(options: argparse.Namespace):
    """mesh.data replicas."""
    from megajax.inference.engine import Engine

    return _open(Engine.replicas_from_run, options)


def _open(from_run, options: argparse.Namespace):
    from megajax.mesh.processes import use_compilation_cache

    opened = from_run(options.run, mesh_of(options), options.step, _serving(options), options.draft_run)
    use_compilation_cache()
    return opened


def _serving(options: argparse.Namespace):
    """The ServingConfig of the engine, checked."""
    from megajax.inference.config import ServingConfig

    serving = ServingConfig(**{name: getattr(options, name) for name in SERVING if getattr(options, name) is not None})
    serving.check()
    return serving


def _sampling(options: argparse.Namespace):
    from megajax.inference.tokens.sampling import Sampling

    fields = [field.name for field in dataclasses.fields(Sampling) if hasattr(options, field.name)]
    seed = secrets.randbits(32) if options.seed is None else options.seed
    given = {name: getattr(options, name) for name in fields}
    sampling = Sampling(**given | {"stop": tuple(options.stop), "seed": seed})
    sampling.check()
    return sampling


def _say_seed(options: argparse.Namespace, sampling) -> None:
    if options.seed is None and sampling.temperature > 0:
        logger.info("seed %d; --seed=%d repeats this", sampling.seed, sampling.seed)


def _check_template(options: argparse.Namespace) -> None:
    if options.chat_template is not None and not Path(options.chat_template).is_file():
        raise ValueError(f"chat_template={options.chat_template} is not a file; name one with a chat template")


def _template(engine, options: argparse.Namespace):
    """The chat template, or None."""
    from megajax.data.tokenizers.chat_template import find_chat_template

    return find_chat_template(engine.tokenizer, options.chat_template)


# ----------------------------------------------------------------------------- command line


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{generate,chat,serve,bench,fill,embed,classify}"
    )
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_bench(commands)
    _add_encoder_commands(commands)
    return parser.parse_args(arguments)


def _add_generate(commands) -> None:
    command = _add_command(commands, "generate", "continue prompts")
    command.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    command.add_argument("--prompts", help="file with a prompt per line; .jsonl: objects with the field prompt")
    command.add_argument("--output", help="new file for a line of JSON per prompt; -: standard output")
    command.add_argument("--num_beams", type=int, default=1, help="beam search, for models with an encoder (1)")
    _add_sampling(command)


def _add_chat(commands) -> None:
    command = _add_command(commands, "chat", "chat in the terminal")
    command.add_argument("--system", default="", help="system message")
    _add_template(command)
    _add_sampling(command)


def _add_serve(commands) -> None:
    command = _add_command(commands, "serve", "HTTP server")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (8000)")
    command.add_argument("--model_name", default="", help="name of the model in requests; default: that of DIR")
    command.add_argument("--api_key", action="append", default=[], help="key to ask for; may be repeated")
    command.add_argument("--api_key_file", help="file with a key per line; other users cannot see it with ps")
    command.add_argument(
        "--max_requests", type=int, default=4096, help="samples that may wait or run; 429 beyond (4096)"
    )
    command.add_argument(
        "--request_timeout_seconds", type=float, default=600.0, help="slower requests are cancelled (600)"
    )
    command.add_argument("--allow_load", action="store_true", help="let /v1/load replace the parameters")
    command.add_argument(
        "--log_requests",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log a line per request: client, path, status, tokens, seconds (default: yes)",
    )
    _add_template(command)


def _add_bench(commands) -> None:
    command = _add_command(commands, "bench", "measure the speed", needs_run=False)
    command.add_argument("--batch", type=_numbers(int), default=[1, 8], help="batch sizes, separated by commas (1,8)")
    command.add_argument("--prompt_tokens", type=int, default=128, help="tokens of each prompt (128)")
    command.add_argument("--max_tokens", type=int, default=64, help="tokens to generate per prompt (64)")
    command.add_argument("--repeats", type=int, default=3, help="with --batch: the median is shown (3)")
    load = command.add_argument_group("latency and throughput under load, instead of --batch")
    load.add_argument(
        "--request_rate", type=_numbers(float), default=[], help="requests per second, at random times; inf: at once"
    )
    load.add_argument("--concurrency", type=_numbers(int), default=[], help="number of requests at a time")
    load.add_argument("--num_requests", type=int, default=100, help="requests per load (100)")
    load.add_argument("--seed", type=int, default=0, help="of the random times (0)")
    load.add_argument("--url", help="server to measure, instead of --run: http://HOST:PORT")
    load.add_argument("--api_key", help="its key")
    load.add_argument("--json", help="file for the results, a line of JSON per load")
    load.add_argument("--figure", help="file for a plot, .svg or .png")


def _add_encoder_commands(commands) -> None:
    fill = _add_command(commands, "fill", "fill masks", has_engine=False)
    fill.add_argument("--top_k", type=int, default=5, help="tokens to show for each mask (5)")
    embed = _add_command(commands, "embed", "embed texts", has_engine=False)
    embed.add_argument("--pooling", choices=("mean", "cls"), default="mean", help="of the last hidden states (mean)")
    classify = _add_command(commands, "classify", "classify texts or words", has_engine=False)
    for command in (fill, embed, classify):
        command.add_argument("--text", action="append", default=[], help="a text; may be repeated")
        command.add_argument("--texts", help="file with a text per line; .jsonl: objects with text, text_pair or words")
        command.add_argument("--output", help="new file for a line of JSON per text; default: standard output")


def _numbers(kind: type):
    def parse(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            whole = "whole numbers" if kind is int else "numbers"
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {whole}, separated by commas") from None

    return parse


def _add_command(
    commands, name: str, help: str, needs_run: bool = True, has_engine: bool = True
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help)
    command.add_argument("--run", required=needs_run, help="directory of a run (runs/NAME) or a Hugging Face folder")
    command.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    add_mesh_options(
        command, data="replicas, each on devices of its own" if name == "serve" else "devices on this axis"
    )
    if not has_engine:
        return command
    engine = command.add_argument_group("engine")
    for field, (kind, text) in SERVING.items():
        engine.add_argument(f"--{field}", type=kind, help=text)
    engine.add_argument(
        "--draft_run", help="run or Hugging Face folder of a smaller model that guesses --draft_tokens tokens"
    )
    return command


def _add_template(command: argparse.ArgumentParser) -> None:
    command.add_argument("--chat_template", help="file with a jinja2 chat template; default: that of the tokenizer")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max_tokens", type=int, default=128, help="maximum number of tokens to generate (128)")
    command.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (1.0)")
    command.add_argument("--top_k", type=int, default=0, help="sample from the k most likely tokens; 0: all (0)")
    command.add_argument(
        "--top_p", type=float, default=1.0, help="sample from the nucleus of this probability; 1: all (1.0)"
    )
    command.add_argument("--min_p", type=float, default=0.0, help="least probability, relative to the highest (0)")
    command.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1: fewer repetitions (1.0)")
    command.add_argument("--seed", type=int, help="the same seed gives the same text; default: a new one each time")
    command.add_argument("--stop", action="append", default=[], help="text that ends the generation; may be repeated")
