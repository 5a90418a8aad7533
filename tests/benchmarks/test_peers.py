"""The peers and the limit do the work that the model counts."""

import dataclasses
import json

import jax
import pytest

import configs
from benchmarks.peers import limit
from megajax.mesh.config import MeshConfig
from megajax.overrides import override

MEASURED = {"gpt_1p3b": 1, "llama3_8b_8layers": 1, "llama3_8b": 8, "gpt3_7b": 8}
TINY = ["--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=4", "--model.num_kv_heads=2",
        "--model.mlp_dim=64", "--model.vocab_size=128", "--model.vocab_multiple=16", "--training.sequence_length=32",
        "--training.global_batch_size=8"]  # fmt: skip


MIXTURE = ["--mesh.fsdp=1", "--mesh.expert=1", "--training.microbatch_size=none", "--model.moe.shared_dim=512"]


@pytest.mark.parametrize(("name", "num_devices"), [*MEASURED.items(), ("qwen3_30b_a3b", 1)])
def test_limit_multiplies_what_a_device_has_to(name, num_devices):
    overrides = MIXTURE if name == "qwen3_30b_a3b" else []
    config = override(configs.recipe(name), overrides).check_on(num_devices)
    gemms, attention = limit.work(config)
    flops = (sum(gemm.flops for gemm in gemms) + attention.flops) * num_devices
    length = config.training.sequence_length
    tokens = config.training.global_batch_size * length
    assert flops == config.make_model().flops_per_token(length, causal=False) * tokens


def test_limit_of_a_split_sequence_is_refused():
    config = dataclasses.replace(configs.recipe("llama3_8b"), mesh=MeshConfig(context=2))
    with pytest.raises(ValueError, match="mesh.context=2"):
        limit.work(config)


def test_limit_of_split_experts_is_refused():
    with pytest.raises(ValueError, match="mesh.expert=2, mesh.tensor=1: the limit of split experts"):
        limit.work(override(configs.recipe("moe_tiny"), ["--mesh.expert=2"]))


def test_limit_runs(capsys):
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention mixes dtypes
        limit.main(["--config=llama3_8b_8layers", *TINY, "--seconds=0.01", "--windows=2"])
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "limit" and len(found["windows"]) == 2 and min(found["windows"]) > 0
    assert len(found["parts"]) == 5 * 3 + 1


@pytest.mark.parametrize("name", MEASURED)
def test_pytorch_model_has_the_same_parameters_and_flops(name):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.peers.torch_model import Gpt, check, cross_entropy

    config = override(configs.recipe(name), [*TINY, "--training.global_batch_size=2"])
    check(config)
    gpt = Gpt(config.model, 32, torch.device("cpu"), recompute=False)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == config.make_model().num_parameters()
    tokens = torch.randint(0, 128, (2, 33))
    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cross_entropy(gpt(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert counter.get_total_flops() == config.make_model().flops_per_token(32, causal=False) * 64


def test_pytorch_experts_match_a_loop():
    torch = pytest.importorskip("torch")
    from benchmarks.peers.torch_model import Gpt, check, initialise

    tiny = [*TINY, *MIXTURE, "--model.moe.num_experts=4", "--model.moe.router.top_k=2", "--model.moe.expert_dim=16",
            "--model.moe.shared_dim=32", "--training.global_batch_size=2"]  # fmt: skip
    config = override(configs.recipe("qwen3_30b_a3b"), tiny)
    check(config)
    torch.manual_seed(0)  # of 60, the one with the largest error of a token has 0.019, and this one 0.009
    gpt = Gpt(config.model, 32, torch.device("cpu"), recompute=False)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == config.make_model().num_parameters()
    initialise(gpt, 1.0)
    experts = gpt.blocks[0].mlp.to(torch.bfloat16)
    x = torch.randn(2, 32, 32).to(torch.bfloat16)
    found = experts(x)

    def one(row, wide, narrow):
        gate, up = (row @ wide).chunk(2)
        return (torch.nn.functional.silu(gate) * up) @ narrow

    exact = experts.float()
    rows = x.float().flatten(0, 1)
    for row, y in zip(rows, found.flatten(0, 1), strict=True):
        scores, chosen = torch.topk(torch.softmax(row @ exact.router, -1), 2)
        parts = [one(row, exact.wide[expert], exact.narrow[expert]) for expert in chosen]
        y_exact = (scores / scores.sum()) @ torch.stack(parts) + exact.shared(row)
        assert torch.linalg.norm(y.float() - y_exact) < 0.02 * torch.linalg.norm(y_exact)


def test_pytorch_model_with_adapters_trains_them_alone():
    torch = pytest.importorskip("torch")
    from benchmarks.peers.torch_lora import adapt
    from benchmarks.peers.torch_model import Gpt, cross_entropy, initialise

    config = override(configs.recipe("llama3_8b_8layers"), [*TINY, "--lora.rank=4"])
    gpt = Gpt(config.model, 32, torch.device("cpu"), recompute=False)
    initialise(gpt, config.model.init_std)
    tokens = torch.randint(0, 128, (2, 33))
    with torch.autocast("cpu", torch.bfloat16):
        before = gpt.to(torch.bfloat16)(tokens[:, :-1])
        adapt(gpt, config.lora)
        assert torch.equal(gpt(tokens[:, :-1]), before)
        cross_entropy(gpt(tokens[:, :-1]), tokens[:, 1:]).backward()
    trained = {name: p for name, p in gpt.named_parameters() if p.grad is not None}
    assert len(trained) == 2 * 2 * 5 and all(".a." in name or ".b." in name for name in trained)
    widths = sum(p.shape[1] if ".a." in name else p.shape[0] for name, p in trained.items())
    per_layer = 3 * 32 + (32 + 2 * 16) + 2 * 32 + 2 * (32 + 64) + 64 + 32  # ours: queries, keys and values apart
    ours = sum(p.size for p in config.make_model().parameters if p.is_trained)
    assert ours == 4 * 2 * per_layer and widths == 2 * (per_layer - 2 * 32)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_of_the_peer_are_timed_and_train(num_microbatches, monkeypatch):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import torch_step
    from benchmarks.peers.torch_model import Gpt, cross_entropy, initialise

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(torch_step, "LEARNING_RATE", 1e-2)
    config = override(configs.recipe("gpt_1p3b"), TINY)
    gpt = Gpt(config.model, 32, torch.device("cpu"), recompute=True)
    initialise(gpt, config.model.init_std)
    tokens = torch.randint(0, 128, (2, 33))
    counts = []
    found = torch_step.measure_steps(
        gpt,
        lambda: cross_entropy(gpt(tokens[:, :-1]), tokens[:, 1:]),
        0.05,
        2,
        num_microbatches=num_microbatches,
        agreed=lambda count: counts.append(count) or count,
        others={"other": "1"},
    )
    assert found["loss"] < found["first_loss"] and found["device"] == "1 x cpu"
    assert len(found["windows"]) == 2 and len(counts) == 5 and found["versions"]["other"] == "1"


def test_peer_refuses_what_it_does_not_do():
    pytest.importorskip("torch")
    from benchmarks.peers.torch_model import check

    with pytest.raises(ValueError, match="training.microbatch_size=32: the PyTorch peer"):
        check(configs.recipe("gpt2_124m"))
