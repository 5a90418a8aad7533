"""vLLM as the peer of the engine on one GPU or several: the recipe's model with random weights, in bf16, greedy.

    python -m benchmarks.peers.vllm_decode --config=llama3_8b [--batch=1,32,128] [--requests=256] [--rate=8,20,32]
        [--quantization=fp8|gptq] [--kv_cache_dtype=fp8] [--gpus=2]

Prints a line of JSON when it is ready, for each batch (1,024 prompt and 256 new tokens), and for the requests of
benchmarks/requests.py: all at once, and as they arrive.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks import requests
from benchmarks.command_line import read_config, run, split
from megajax.weights.hugging_face.export import write_options
from megajax.weights.hugging_face.mapping import family_for

PROMPT_TOKENS = 1024
MAX_LENGTH = 8192
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    # Parts of names. vLLM would otherwise look for matrices in 4 bits in the folder, which has none.
    "modules_in_block_to_quantize": ["self_attn", "mlp"],
}
# One process, so that it takes steps when it is asked to; no kernels that are compiled when they are first used.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    def __init__(self, config, num_gpus: int, **given: str):
        """config: of the model. num_gpus: that split its matrices. given: options of vLLM."""
        os.environ |= SETTINGS
        from vllm import LLM

        family = family_for(config)
        options = write_options(family, config) | {"max_position_embeddings": MAX_LENGTH, "torch_dtype": "bfloat16"}
        if given.get("quantization") == "gptq":  # vLLM chooses the kernel by what the folder says
            options["quantization_config"] = GPTQ
            del given["quantization"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(options))
            self.llm = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=MAX_LENGTH,
                max_num_seqs=256,
                tensor_parallel_size=num_gpus,
                kernel_config={"enable_flashinfer_autotune": False},
                **given,
            )
        self.engine = self.llm.llm_engine
        self.vocab_size = config.vocab_size
        self._known: dict[int, int] = {}
        """Tokens of each request so far."""

    def submit(self, number: int, prompt: list[int], max_tokens: int = requests.NEW_TOKENS) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        self._known[number] = 0

    def step(self) -> list[tuple[int, int]]:
        found = []
        for output in self.engine.step():
            number = int(output.request_id.split("-")[0])
            count = len(output.outputs[0].token_ids)
            if count > self._known[number]:
                found.append((number, count - self._known[number]))
                self._known[number] = count
        return found

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Of all prompts at once."""
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self.submit(number, prompt, max_tokens)
        while self.engine.has_unfinished_requests():
            self.step()
        return time.perf_counter() - start

    def decoding(self, batch_size: int) -> dict:
        """The time of the tokens after the first."""

        def prompts(seed: int) -> list[list[int]]:
            # Other prompts than for other batches, which vLLM would have cached.
            found = requests.prompts_of(4 * batch_size, self.vocab_size, 100 * batch_size + seed)
            tokens = [token for prompt in found for token in prompt] * 4
            return [tokens[PROMPT_TOKENS * row : PROMPT_TOKENS * (row + 1)] for row in range(batch_size)]

        self.seconds(prompts(10), 4)
        of_prompts = min(self.seconds(prompts(11 + i), 1) for i in range(2))
        of_both = min(self.seconds(prompts(13 + i), 1 + requests.NEW_TOKENS) for i in range(2))
        step = (of_both - of_prompts) / requests.NEW_TOKENS
        return {
            "batch": batch_size,
            "prefill_tokens_per_second": batch_size * PROMPT_TOKENS / of_prompts,
            "step_seconds": step,
            "decode_tokens_per_second": batch_size / step,
        }


def main(arguments: list[str]) -> None:
    formats = {"quantization": "", "kv_cache_dtype": "auto"}
    values, overrides = split(
        arguments, {"config": "", "batch": "1,32,128", "requests": "256", "rate": "8,20,32", "gpus": "1"} | formats
    )
    config = read_config(values["config"], overrides)

    def show(result: dict) -> None:
        print(json.dumps({"peer": "vllm"} | result), flush=True)

    start = time.perf_counter()
    peer = Peer(config.model, int(values["gpus"]), **{name: values[name] for name in formats if values[name]})
    show({"ready_seconds": time.perf_counter() - start})
    for batch_size in filter(None, values["batch"].split(",")):
        show(peer.decoding(int(batch_size)))
    arguments_of = (peer.vocab_size, peer.submit, peer.step)
    for seed in (1, 0):  # the first time some kernels are compiled
        mixed = requests.at_once(int(values["requests"]), *arguments_of, seed=seed)
    show(mixed)
    for rate, workload in requests.cases(map(float, filter(None, values["rate"].split(",")))):
        show(requests.at_rate(rate, *arguments_of, workload))


if __name__ == "__main__":
    run(main)
