"""What --plan predicts for runs whose speed others have published: python -m benchmarks.published [--rows=0,3]

Prints a table. Each row has the model, the GPUs, the batch and the sequence of a published run, in the number format of
that run; the mesh, the microbatch size and the recomputation are those that `--plan=search:N` finds. A prediction is no
measurement: docs/growth.md says what it assumes, and where the published numbers are.
"""

import dataclasses

import megajax
from benchmarks.command_line import only, run
from megajax.planning.plan import plan_device
from megajax.planning.search import search

H100 = plan_device("h100")
LLAMA_405B = {
    "model.num_layers": 126, "model.embed_dim": 16384, "model.num_heads": 128, "model.num_kv_heads": 8,
    "model.mlp_dim": 53248,
}  # fmt: skip
FP8 = {"precision.recipe": "fp8"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run."""

    model: str
    recipe: str
    num_gpus: int
    batch_size: int
    length: int
    tokens_per_second: dict[str, float]
    """{who: tokens per second and GPU}"""
    overrides: dict = dataclasses.field(default_factory=dict)

    def row(self) -> list[str]:
        sizes = {"training.global_batch_size": self.batch_size, "training.sequence_length": self.length}
        config = megajax.recipe(self.recipe, sizes | self.overrides).with_steps()
        best = search(config, self.num_gpus, H100).best[0]
        rate = self.batch_size * self.length / best.step_seconds / self.num_gpus
        mesh = ", ".join(f"{axis} {size}" for axis, size in best.config.mesh.sizes().items() if size > 1)
        others = "; ".join(f"{who} {speed:,.0f}" for who, speed in self.tokens_per_second.items())
        size = f"{self.num_gpus}, {self.batch_size} x {self.length}"
        return [self.model, size, others, f"{rate:,.0f}", f"{mesh}; recompute {best.config.execution.recompute}"]


RUNS = (
    Run("Llama-3 8B, bf16", "llama3_8b", 8, 128, 8192, {"NeMo": 10_682}),
    Run("Llama-3 8B, bf16", "llama3_8b", 8, 16, 8192, {"torchtitan": 6_667}),
    Run("Llama-3 8B, FP8", "llama3_8b", 8, 128, 8192, {"Megatron-Bridge": 14_451, "NeMo": 14_049}, FP8),
    Run("Llama-3 70B, bf16", "llama3_70b", 128, 256, 8192, {"NeMo": 1_117, "MaxText": 1_053}),
    Run("Llama-3 70B, FP8", "llama3_70b", 128, 256, 8192, {"MaxText": 1_806, "NeMo": 1_647}, FP8),
    Run("Llama-3 405B, bf16", "llama3_70b", 512, 256, 8192, {"NeMo": 207}, LLAMA_405B),
    Run("Llama-3 405B, FP8", "llama3_70b", 512, 256, 8192, {"NeMo": 331}, LLAMA_405B | FP8),
    Run("GPT-3 175B, bf16", "gpt_175b", 128, 256, 2048, {"NeMo": 493}),
    Run("GPT-3 175B, FP8", "gpt_175b", 128, 256, 2048, {"NeMo": 728, "PaxML": 548}, FP8),
)


def main(arguments: list[str]) -> None:
    numbers = only(arguments, {"rows": ",".join(map(str, range(len(RUNS))))})["rows"].split(",")
    print("| model | H100s, batch | published, tokens/s per GPU | planned | on |")
    print("|---|---|---|---|---|")
    for number in numbers:
        print(f"| {' | '.join(RUNS[int(number)].row())} |", flush=True)


if __name__ == "__main__":
    run(main)
