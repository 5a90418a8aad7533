"""The profile of compiler options: what it says for which machine, who overrides it, and what it never does."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import configs
from benchmarks.settings import ablation
from megajax.cli import train
from megajax.config import Config
from megajax.mesh import processes
from megajax.mesh.processes import use_compilation_cache, xla_flags
from megajax.models.model import Model
from megajax.overrides import override
from megajax.training import compiler_options as module
from megajax.training.compiler_options import (
    PROFILE,
    Option,
    Target,
    choose,
    compiler_options,
    parse,
    refusal,
    target_of,
)

REDUCE_SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
# Llama 8B on eight H100s: 436 MB a layer in bfloat16.
LLAMA = Target("NVIDIA H100 80GB HBM3", num_devices=8, layer_bytes=436_224_000, weight_shards=8, scanned=False)
TINY = ["--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=2", "--model.mlp_dim=64",
        "--model.vocab_size=128", "--training.sequence_length=32", "--training.global_batch_size=8",
        "--data.source=mock", "--data.text=", "--data.tokenizer=null:127", "--training.eval_every_steps=0",
        "--training.sample_prompt=", "--optimizer.warmup_steps=0", "--optimizer.name=adamw",
        "--logging.tensorboard=False"]  # fmt: skip


def tiny(*arguments: str) -> Config:
    return override(configs.recipe("gpt_tiny"), [*TINY, *arguments])


@pytest.fixture
def on_h100s(monkeypatch):
    """The CPU takes xla_gpu options and ignores them; jaxlib checks their names and values all the same."""
    monkeypatch.setattr(module, "target_of", lambda model, mesh: LLAMA)
    monkeypatch.setattr(module, "PROFILE", (option("xla_gpu_enable_triton_gemm", False),))


def option(name: str, value) -> Option:
    return Option(name, value=lambda target: value, when=lambda target: True, why="a test")


def chosen(requested: str, mesh) -> dict[str, str]:
    return compiler_options(tiny(f"--execution.compiler_options={requested}").make_model(), mesh)


# ----------------------------------------------------------------------------- the table


def test_gradients_leave_layer_by_layer_over_many_devices():
    over = lambda shards: choose(PROFILE, dataclasses.replace(LLAMA, weight_shards=shards)).get(REDUCE_SCATTER)
    assert over(64) == str(436_224_000 // 64)
    assert over(1) is None and over(8) is None, "a layer's shard exceeds XLA's default: nothing to correct"
    assert REDUCE_SCATTER not in choose(PROFILE, dataclasses.replace(LLAMA, weight_shards=64, scanned=True))


def test_messages_of_a_ring_are_under_way_together():
    name = "xla_gpu_experimental_parallel_collective_overlap_limit"
    assert choose(PROFILE, dataclasses.replace(LLAMA, has_ring=True))[name] == "8"
    assert name not in choose(PROFILE, LLAMA)


def test_scheduler_does_not_hoard_beside_copies_to_the_host():
    name = "xla_gpu_enable_analytical_sol_latency_estimator"
    one = dataclasses.replace(LLAMA, num_devices=1, weight_shards=1, offloads=True)
    assert choose(PROFILE, one)[name] == "False"
    assert name not in choose(PROFILE, dataclasses.replace(one, offloads=False))
    assert name not in choose(PROFILE, dataclasses.replace(LLAMA, offloads=True)), "it hides collectives there"


def test_deterministic_model_has_a_deterministic_program(make_test_mesh):
    target = lambda *arguments: target_of(tiny(*arguments).make_model(), make_test_mesh())
    assert target("--execution.deterministic=True").deterministic and not target().deterministic
    name = "xla_gpu_deterministic_ops"
    assert choose(PROFILE, dataclasses.replace(LLAMA, deterministic=True))[name] == "True"
    assert name not in choose(PROFILE, LLAMA)


def test_options_are_for_the_gpus_they_were_measured_on():
    assert choose(PROFILE, dataclasses.replace(LLAMA, chip="cpu")) == {}
    triton = lambda chip: choose(PROFILE, dataclasses.replace(LLAMA, chip=chip)).get("xla_gpu_enable_triton_gemm")
    assert triton("NVIDIA H200") == "False" and triton("NVIDIA A100-SXM4-80GB") is None


def test_this_jaxlib_takes_every_option_of_the_table(make_test_mesh):
    """Names rot: one that is gone has to leave the table (or get a version)."""
    mesh = make_test_mesh()
    changes = dict(weight_shards=64), dict(num_devices=1, offloads=True), dict(has_ring=True), dict(deterministic=True)
    targets = [dataclasses.replace(LLAMA, **change) for change in changes]
    options = {item for target in targets for item in choose(PROFILE, target).items()}
    assert {name for name, _ in options} == {option.name for option in PROFILE}
    options |= set(parse(ablation.CANDIDATES).items())
    assert {name: why for name, value in options if (why := refusal(name, value, mesh))} == {}


def test_bytes_of_a_layer_are_what_a_device_computes_with(make_test_mesh):
    config = tiny("--precision.compute=bfloat16")
    target = target_of(config.make_model(), make_test_mesh(fsdp=2, tensor=2))
    deeper = dataclasses.replace(config.model, num_layers=config.model.num_layers + 1)
    parameters = Model(deeper).num_parameters() - Model(config.model).num_parameters()
    scales = 2 * (config.model.embed_dim + config.model.width_of_head)  # of four norms, whole on every device
    assert target.layer_bytes == 2 * ((parameters - scales) // 2 + scales), "two bytes a parameter"
    assert (target.weight_shards, target.num_devices, target.chip) == (2, 4, "cpu")


# ----------------------------------------------------------------------------- who decides


@pytest.mark.usefixtures("on_h100s")
def test_what_is_requested_overrides_xla_flags_and_those_override_the_profile(make_test_mesh, monkeypatch):
    mesh = make_test_mesh()
    assert chosen("", mesh) == {"xla_gpu_enable_triton_gemm": "False"}
    assert chosen("xla_gpu_enable_triton_gemm=true", mesh) == {"xla_gpu_enable_triton_gemm": "True"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm")
    assert chosen("", mesh) == {}
    assert chosen("xla_gpu_enable_triton_gemm=true", mesh) == {"xla_gpu_enable_triton_gemm": "True"}


def test_xla_flags_may_lie_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", " --xla_a=1 --xla_b --xla_c=x,y")
    assert xla_flags() == {"xla_a": "1", "xla_b": "", "xla_c": "x,y"}
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert xla_flags() == {"xla_a": "1", "xla_b": ""}


def test_option_that_jaxlib_does_not_know_is_left_out_with_one_line(make_test_mesh, monkeypatch):
    options = (option("xla_gpu_colour", 3), option("xla_gpu_graph_min_graph_size", 7))
    monkeypatch.setattr(module, "PROFILE", options)
    monkeypatch.setattr(module, "target_of", lambda model, mesh: LLAMA)
    messages = []
    monkeypatch.setattr(module.logger, "info", lambda text, *values: messages.append(text % values))
    assert chosen("", make_test_mesh()) == {"xla_gpu_graph_min_graph_size": "7"}
    (message,) = messages
    assert "xla_gpu_colour=3 left out" in message and "No such compile option" in message


@pytest.mark.parametrize("entry", ["xla_gpu_colour=3", "xla_gpu_enable_triton_gemm=maybe"])
def test_requested_option_that_jaxlib_refuses_is_an_error(entry, make_test_mesh):
    with pytest.raises(ValueError, match=f"execution.compiler_options: {entry} is refused") as error:
        chosen(entry, make_test_mesh())
    assert "\n" not in str(error.value)


def test_requested_options_are_written_as_in_xla_flags():
    assert parse("") == {}
    assert parse("xla_a=1  xla_b=x,y xla_c= xla_d=true") == {"xla_a": "1", "xla_b": "x,y", "xla_c": "", "xla_d": "True"}
    for text in ("xla_a", "colour=3", "xla_a=1, xla_b"):
        with pytest.raises(ValueError, match="execution.compiler_options: .* is not xla_NAME=VALUE"):
            parse(text)


def test_options_reach_the_compiler(make_test_mesh):
    config, mesh = tiny(), make_test_mesh()
    program = dataclasses.replace(config.make_program(mesh), compiler_options={"xla_gpu_colour": "3"})
    step = program.train_step(config.training)
    arrays = {name: jax.ShapeDtypeStruct((1, 8, 32), "int32") for name in ("tokens", "labels", "positions")}
    arrays["loss_mask"] = jax.ShapeDtypeStruct((1, 8, 32), "float32")
    with jax.set_mesh(mesh):
        lowered = step.lower(program.abstract_state, arrays, jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_colour"):
        lowered.compile()


def test_run_records_its_options_and_resumes_with_others(tmp_path, capsys):
    run = ["--config=gpt_tiny", *TINY, f"--run_dir={tmp_path / 'run'}", f"--data.cache_dir={tmp_path}", "--mesh.data=8"]
    train.main([*run, "--training.steps=1", "--execution.compiler_options=xla_gpu_graph_min_graph_size=7"])
    train.main([*run, "--training.steps=2"])
    first, second = (json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines())
    assert first["compiler_options"] == {"xla_gpu_graph_min_graph_size": "7"} and second["compiler_options"] == {}
    assert first["jax"] == jax.__version__ and first["devices"] == "8 x cpu"
    assert "compiler options  xla_gpu_graph_min_graph_size=7" in capsys.readouterr().out


# ----------------------------------------------------------------------------- compilation cache


@pytest.fixture
def cache_dir(monkeypatch):
    """-> what use_compilation_cache sets on a machine with a GPU; nothing is set in truth."""
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)  # tests/conftest.py sets it
    return lambda: settings.get("jax_compilation_cache_dir")


def test_compiled_programs_are_kept_at_home(cache_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    use_compilation_cache()
    assert cache_dir() == str(tmp_path / ".cache/megajax/compilation") and Path(cache_dir()).is_dir()


def test_folder_that_cannot_be_written_stops_no_run(cache_dir, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(processes.logger, "propagate", True)
    use_compilation_cache(tmp_path / "file" / "cache")
    assert cache_dir() is None and "compiled programs are not cached" in caplog.text


def test_programs_for_a_cpu_are_kept_apart_by_cpu_flags_and_jaxlib(cache_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    found = []
    for flags, jaxlib_version, features in [("", "0.10.2", "avx2"), ("--xla_a=1", "0.10.2", "avx2"),
                                            ("", "0.11.2", "avx2"), ("", "0.10.2", "avx512"),
                                            ("", "0.10.2", "avx2")]:  # fmt: skip
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(processes.jaxlib, "__version__", jaxlib_version)
        monkeypatch.setattr(processes, "cpu_features", lambda features=features: features)
        use_compilation_cache(tmp_path)
        found.append(cache_dir())
    assert all(Path(folder).parent == tmp_path and Path(folder).is_dir() for folder in found)
    assert len(set(found)) == 4 and found[0] == found[-1]


def test_another_process_on_this_cpu_compiles_nothing_again(tmp_path):
    program = """
import jax
from megajax.mesh.processes import use_compilation_cache
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
use_compilation_cache()
y = jax.jit(lambda key: jax.random.normal(key, (8, 8)).sum())(jax.random.key(0))
print(events.count("cache_hits"), events.count("cache_misses"), float(y).hex())
"""
    mine = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in mine} | {"HOME": str(tmp_path)}

    def run() -> list[str]:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stderr == "", done.stderr  # no warning of another CPU either
        return done.stdout.split()

    first, second = run(), run()
    assert int(first[0]) == 0 and int(second[0]) > 0
    assert second[2] == first[2]


def test_setting_of_jax_counts_more(cache_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", "elsewhere", raising=False)
    use_compilation_cache(tmp_path / "cache")
    assert cache_dir() is None and not (tmp_path / "cache").exists()
