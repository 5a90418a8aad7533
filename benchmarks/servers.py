"""This server and vLLM's in turn, of one Hugging Face folder with random weights, under the same loads over HTTP:

    python -m benchmarks.servers --config=llama3_8b [--servers=megajax,vllm] [--folder=DIR] [--output=FILE]
        [--prompt_tokens=512] [--max_tokens=256] [--scale=1] [--section.field=value ...]

Loads: one request at a time, 128 at a time, 20 per second at random times, and 160 at once; two rounds, of which the
first one makes connections and fills caches. --scale multiplies the numbers of requests. The folder is written with
transformers, on a GPU if there is one, and is kept if --folder names it; one that is there is used as it is. vLLM is
left out with one line where it is not installed. Prints lines of JSON, those of `infer.py bench` and `ready_seconds`.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command_line import read_config, run, split
from benchmarks.peers.vllm_decode import MAX_LENGTH, SETTINGS
from megajax.cli.serving import bench_server
from megajax.inference.config import Workload
from megajax.inference.traffic import Load
from megajax.weights.hugging_face.export import write_options
from megajax.weights.hugging_face.mapping import family_for

LOADS = (
    (Load(concurrency=1), 4),
    (Load(concurrency=128), 256),
    (Load(request_rate=20.0), 160),
    (Load(request_rate=float("inf")), 160),
)
"""With the number of requests."""
ROUNDS = 2
READY_SECONDS = 300
# Its engine in a process of its own, as its server has it by default.
ENVIRONMENT = SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
INFER = Path(__file__).parents[1] / "infer.py"


def write_folder(options: dict, folder: Path) -> None:
    """A model with the random weights of transformers in bfloat16, and a tokenizer with a text for each of its tokens.

    options: of config.json.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(options))
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"w{token}" for token in range(len(texts), options["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=texts[-1]).save_pretrained(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")


def commands(folder: Path, port: int) -> dict[str, list[str]]:
    """Of each server."""
    vllm = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    return {
        "megajax": [sys.executable, str(INFER), "serve", f"--run={folder}", f"--port={port}"],
        "vllm": [sys.executable, *vllm, "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "256"],
    }


@contextlib.contextmanager
def serving(command: list[str], url: str) -> Iterator[float]:
    """Seconds until the server is ready. Raises ValueError if it ends before."""
    import httpx2

    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | ENVIRONMENT) as process:
        try:
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    if httpx2.get(f"{url}/health").is_success:
                        break
                if process.poll() is not None or time.perf_counter() > start + READY_SECONDS:
                    raise ValueError(f"{' '.join(command)} was not ready within {READY_SECONDS} s; its log says why")
                time.sleep(0.2)
            yield time.perf_counter() - start
        finally:
            process.terminate()


def measured(command: list[str], url: str, scale: float, sizes: dict[str, int]) -> Iterator[dict]:
    """sizes: of the prompts and of what is generated."""
    with serving(command, url) as ready_seconds:
        yield {"ready_seconds": ready_seconds}
        for number in range(ROUNDS):
            for load, count in LOADS:
                workload = Workload(num_requests=max(round(scale * count), 1), **sizes)
                (result,) = bench_server(url, None, [load], workload)
                yield {"round": number + 1} | result.record()


def main(arguments: list[str]) -> None:
    known = {"config": "", "servers": "megajax,vllm", "folder": "", "output": "", "scale": "1"}
    sizes = {"prompt_tokens": "512", "max_tokens": "256"}
    values, overrides = split(arguments, known | sizes)
    config = read_config(values["config"], overrides).model
    names = values["servers"].split(",")
    if unknown := set(names) - {"megajax", "vllm"}:
        raise ValueError(f"servers={unknown.pop()} is unknown; there are megajax and vllm")
    if "vllm" in names and importlib.util.find_spec("vllm") is None:
        print("vllm is not installed and is left out", file=sys.stderr)
        names.remove("vllm")
    numbers = {name: int(values[name]) for name in sizes}
    scale = float(values["scale"])
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(values["folder"] or f"{temporary}/model")
        if not folder.exists():
            options = write_options(family_for(config), config) | {"max_position_embeddings": MAX_LENGTH}
            # In a process of its own, which leaves the GPU to the servers.
            writer = multiprocessing.get_context("spawn").Process(target=write_folder, args=(options, folder))
            writer.start()
            writer.join()
            if writer.exitcode:
                raise ValueError(f"{folder} could not be written; the error is above")
        for name in names:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for result in measured(commands(folder, port)[name], f"http://127.0.0.1:{port}", scale, numbers):
                lines.append(json.dumps({"server": name} | result))
                print(lines[-1], flush=True)
                if values["output"]:
                    Path(values["output"]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run(main)
