"""Writes gated_delta_net.npz: a gated delta net of Qwen3-Next as Hugging Face transformers computes it.

pip install torch transformers
python tests/oracles/make_gated_delta_net.py    (last run with transformers 5.23.0 and torch 2.14.1, on a CPU)

Keys are weights/NAME, those of the layer; x and y [B, T, D], and d_x, the gradient of sum(sin(y)).
tests/layers/recurrent/test_delta_net.py compares.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

B, T, D = 2, 20, 16


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=5, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
    )  # fmt: skip
    layer = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name not in ("A_log", "conv1d.weight"):
                parameter.normal_(1.0 if name == "norm.weight" else 0.0, 0.5)
    x = torch.randn(B, T, D, requires_grad=True)
    y = layer(x)
    (d_x,) = torch.autograd.grad(y.sin().sum(), x)
    arrays = {f"weights/{name}": parameter for name, parameter in layer.named_parameters()}
    arrays |= dict(x=x, y=y, d_x=d_x)
    found = {name: array.detach().numpy() for name, array in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("gated_delta_net.npz"), **found)


if __name__ == "__main__":
    main()
