"""Peer of the engine on one GPU: a Llama of the recipe's sizes in transformers, random weights, bf16, greedy.

    python -m benchmarks.peers.torch_decode --config=llama3_8b [--batch=1,32] [--requests=0] [--section.field=value ...]

Prints a line of JSON for each batch (a compiled static cache, 1,024 prompt tokens) and, with --requests=N, one for
transformers' continuous batching of N requests.
"""

import json
import random
import time

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks.command_line import read_config, run, split

PROMPT_TOKENS = 1024
NEW_TOKENS = 128
WARM_UP = 40  # steps; compiling and capturing CUDA graphs takes the first ones


def make_model(sizes, attention: str) -> LlamaForCausalLM:
    """sizes: of the recipe's model (DecoderConfig). Raises ValueError for a model that is no Llama."""
    if (sizes.norm, sizes.activation, sizes.position, bool(sizes.biases)) != ("rmsnorm", "swiglu", "rope", False):
        raise ValueError("--config: the peer has only models like Llama (rmsnorm, swiglu, rope, no biases)")
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.embed_dim,
        intermediate_size=sizes.width_of_mlp,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width_of_head,
        max_position_embeddings=8192,
        tie_word_embeddings=sizes.tied_embeddings,
        attn_implementation=attention,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval()


@torch.no_grad()
def static(model: LlamaForCausalLM, batch_size: int) -> dict:
    """Decoding with a compiled step."""
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, PROMPT_TOKENS), device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=PROMPT_TOKENS + NEW_TOKENS + 64)

    def forward(tokens, positions):
        options = dict(past_key_values=cache, cache_position=positions, use_cache=True)
        rows = positions[None].expand(batch_size, -1)
        logits = model(tokens, position_ids=rows, logits_to_keep=1, **options).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    step = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
    newest = forward(tokens, torch.arange(PROMPT_TOKENS, device="cuda"))
    position = torch.tensor([PROMPT_TOKENS], device="cuda")
    first = time.perf_counter()
    for number in range(WARM_UP + NEW_TOKENS):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        newest = step(newest, position).clone()
        if number >= WARM_UP:
            position = position + 1
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / NEW_TOKENS
    return {
        "batch": batch_size,
        "step_seconds": seconds,
        "decode_tokens_per_second": batch_size / seconds,
        "compile_seconds": start - first,
    }


@torch.no_grad()
def continuous(sizes, count: int) -> dict:
    """The mix of benchmarks/decode.py with transformers' continuous batching."""
    for attention in ("paged|flash_attention_2", "paged|sdpa"):
        try:
            model = make_model(sizes, attention)
            break
        except (ImportError, ValueError) as error:
            print(json.dumps({"attention": attention, "error": str(error)[:200]}), flush=True)
    generator = random.Random(0)
    lengths = [generator.randint(64, 1024) for _ in range(count)]
    prompts = [[generator.randrange(sizes.vocab_size) for _ in range(length)] for length in lengths]
    options = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=prompts[:16], generation_config=options)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=options)
    seconds = time.perf_counter() - start
    generated = sum(len(output.generated_tokens) for output in outputs.values())
    return {
        "requests": count,
        "attention": attention,
        "generated_tokens": generated,
        "seconds": seconds,
        "generated_tokens_per_second": generated / seconds,
    }


def main(arguments: list[str]) -> None:
    options, rest = split(arguments, {"config": "llama3_8b", "batch": "1,32", "requests": "0"})
    sizes = read_config(options["config"], rest).model
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    if options["batch"]:
        model = make_model(sizes, "sdpa")
        for batch_size in map(int, options["batch"].split(",")):
            print(json.dumps(about | static(model, batch_size)), flush=True)
        del model
    torch.cuda.empty_cache()
    if int(options["requests"]):
        print(json.dumps(about | continuous(sizes, int(options["requests"]))), flush=True)


if __name__ == "__main__":
    run(main)
