"""One Mamba-2 layer of mamba2_2p7b with the authors' kernels in PyTorch, bfloat16.

    python -m benchmarks.peers.torch_mamba

Beside python -m benchmarks.mamba_layer, with the same sequences. Needs the package mamba_ssm; its Triton kernels are
enough, and without causal_conv1d the convolution is PyTorch's. As in our layer, the input is normalised first and added
to the output; everything but the kernels is compiled. Prints milliseconds of the state space alone and of the layer.
Triton tunes each kernel at its first call, which takes minutes.
"""

import torch
from mamba_ssm.modules.mamba2_simple import Mamba2Simple, causal_conv1d_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

from benchmarks.mamba_layer import BATCH, LENGTH
from benchmarks.peers.torch_step import layer_times
from configs.mamba import mamba2_2p7b

CHUNK = 256  # the default of the package


def main() -> None:
    model = mamba2_2p7b().model
    mamba = model.mamba
    options = dict(device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    mixer = Mamba2Simple(
        model.embed_dim, d_state=mamba.state_dim, headdim=mamba.head_dim, ngroups=mamba.num_groups,
        chunk_size=CHUNK, use_mem_eff_path=causal_conv1d_fn is not None, **options,
    )  # fmt: skip
    size = f"chunk {CHUNK}, {BATCH} x {LENGTH} tokens"

    heads = mixer.nheads
    inner = torch.randn(BATCH, LENGTH, heads, mamba.head_dim, **options, requires_grad=True)
    dt = torch.rand(BATCH, LENGTH, heads, device="cuda", requires_grad=True)
    rates = (-torch.rand(heads, device="cuda")).requires_grad_()
    shared = torch.randn(2, BATCH, LENGTH, mamba.num_groups, mamba.state_dim, **options)
    b, c = (part.detach().requires_grad_() for part in shared)

    def scan(x, dt, rates, b, c):
        return mamba_chunk_scan_combined(x, dt, rates, b, c, CHUNK)

    times = layer_times(scan, [inner, dt, rates, b, c], torch.randn_like(inner))
    print(f"mamba_ssm, {size}, state space alone: {times}", flush=True)

    scale = torch.ones(model.embed_dim, **options, requires_grad=True)
    x = torch.randn(BATCH, LENGTH, model.embed_dim, **options, requires_grad=True)

    @torch.compile
    def layer(x, scale, *_):
        return x + mixer(torch.nn.functional.rms_norm(x, scale.shape, scale))

    times = layer_times(layer, [x, scale, *mixer.parameters()], torch.randn_like(x))
    conv = "causal_conv1d" if causal_conv1d_fn else "PyTorch's convolution"
    print(f"mamba_ssm with {conv}, {size}, layer: {times}", flush=True)


if __name__ == "__main__":
    main()
