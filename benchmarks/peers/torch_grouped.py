"""TFLOP/s of torch._grouped_mm (CUTLASS) in bfloat16, as JSON: python -m benchmarks.peers.torch_grouped"""

import json

import numpy as np
import torch

from benchmarks.kernels.grouped_matmul import SHAPES, group_sizes
from benchmarks.kernels.timing import seconds_of


def _synchronise(_) -> None:
    torch.cuda.synchronize()


def main() -> None:
    found = {}
    for name, (rows, width, expert_width, experts) in SHAPES.items():
        options = dict(device="cuda", dtype=torch.bfloat16)
        x = torch.randn(rows, width, **options)
        matrices = torch.randn(experts, width, expert_width, **options)
        d_out = torch.randn(rows, expert_width, **options)
        flops = 2 * rows * width * expert_width
        speeds = {"dense": flops / seconds_of(lambda x=x, m=matrices[0]: x @ m, wait=_synchronise) / 1e12}
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
                speeds[f"{direction}, {kind}"] = flops / seconds_of(call, wait=_synchronise) / 1e12
        found[name] = speeds
    print(json.dumps(found))


if __name__ == "__main__":
    main()
