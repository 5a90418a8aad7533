"""TFLOP/s of torch._grouped_mm (CUTLASS) in bfloat16, as JSON: python -m benchmarks.peers.torch_grouped"""

import json
import time

import numpy as np

# Rows, model width, width of an expert, experts.
SHAPES = {
    "mixtral": (16384, 4096, 14336, 8),
    "deepseek": (32768, 7168, 2048, 32),
    "qwen3": (65536, 2048, 768, 128),
}


def group_sizes(name: str, skewed: bool) -> np.ndarray:
    """int32 [experts]: equal, or of random tokens that choose with the softmax of normal numbers."""
    rows, _, _, experts = SHAPES[name]
    if not skewed:
        return np.full(experts, rows // experts, np.int32)
    rng = np.random.default_rng(7)
    logits = rng.standard_normal(experts)
    return rng.multinomial(rows, np.exp(logits) / np.exp(logits).sum()).astype(np.int32)


def main() -> None:
    import torch

    def seconds_of(call) -> float:
        call()

        def window(count: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / count

        count = max(3, round(0.1 / window(3)))
        return min(window(count) for _ in range(3))

    found = {}
    for name, (rows, width, expert_width, experts) in SHAPES.items():
        options = dict(device="cuda", dtype=torch.bfloat16)
        x = torch.randn(rows, width, **options)
        matrices = torch.randn(experts, width, expert_width, **options)
        d_out = torch.randn(rows, expert_width, **options)
        flops = 2 * rows * width * expert_width
        speeds = {"dense": flops / seconds_of(lambda x=x, m=matrices[0]: x @ m) / 1e12}
        for kind in ("equal", "skewed"):
            ends = torch.tensor(np.cumsum(group_sizes(name, kind == "skewed")), device="cuda", dtype=torch.int32)
            calls = {
                "forward": lambda x=x, m=matrices, ends=ends: torch._grouped_mm(x, m, offs=ends),
                "input_gradient": lambda d=d_out, m=matrices, ends=ends: torch._grouped_mm(
                    d, m.transpose(1, 2), offs=ends
                ),
                "weight_gradient": lambda x=x, d=d_out, ends=ends: torch._grouped_mm(x.t(), d, offs=ends),
            }
            for direction, call in calls.items():
                speeds[f"{direction}, {kind}"] = flops / seconds_of(call) / 1e12
        found[name] = speeds
    print(json.dumps(found))


if __name__ == "__main__":
    main()
