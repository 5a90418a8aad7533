"""Bad input is one line that names the field and the way out, exit code 2, and nothing written or overwritten."""

import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from megajax import run
from megajax.cli import train
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.overrides import override

ROOT = Path(__file__).parents[1]
MOCK = ["--data.source=mock", "--data.text=", "--data.tokenizer=null:2047", "--training.sample_prompt=",
        "--optimizer.name=adamw"]  # fmt: skip
# (arguments after --config=gpt_tiny and a mock data set, what the line must hold: the field and a way out)
CASES = {
    "unknown field": (["--model.layers=3"], ["--model.layers is unknown", "did you mean --model."]),
    "wrong type": (["--training.steps=many"], ["training.steps='many'", "a whole number"]),
    "no value": (["--model.biases"], ["--model.biases=VALUE"]),
    "heads and width": (["--model.num_heads=3"], ["model.embed_dim=128", "model.num_heads=3", "--model.head_dim"]),
    "heads and kv heads": (["--model.num_kv_heads=3"], ["model.num_heads=2", "model.num_kv_heads=3"]),
    "no kv heads": (["--model.num_kv_heads=0"], ["model.num_kv_heads=0", "at least 1, or None"]),
    "heads over tensor": (["--mesh.data=1", "--mesh.tensor=8"], ["model.num_heads=2", "use --mesh.tensor=2"]),
    "kv heads over tensor": (
        ["--model.num_kv_heads=1", "--mesh.data=4", "--mesh.tensor=2"],
        ["model.num_kv_heads=1", "mesh.tensor=2", "use --mesh.tensor=1"],
    ),
    "vocabulary over tensor": (
        ["--model.vocab_size=2047", "--model.vocab_multiple=1", "--mesh.data=4", "--mesh.tensor=2"],
        ["model.vocab_size=2047", "mesh.tensor(2)", "use --model.vocab_multiple=2"],
    ),
    "vocabulary multiple": (["--model.vocab_multiple=0"], ["model.vocab_multiple=0", "at least 1"]),
    "width over fsdp": (
        ["--model.embed_dim=132", "--mesh.data=1", "--mesh.fsdp=8"],
        ["model.embed_dim=132", "mesh.fsdp(8)", "use --mesh.fsdp=4"],
    ),
    "batch": (["--training.global_batch_size=12"], ["training.global_batch_size=12", "=16"]),
    "batch and microbatch": (
        ["--training.microbatch_size=4"],
        ["training.global_batch_size=16", "training.microbatch_size(4)", "=32"],
    ),
    "batch of the ramp-up": (
        ["--training.batch_size_rampup=4,4,100"],
        ["training.global_batch_size=4", "=8"],
    ),
    "ramp-up that misses the batch": (
        ["--training.batch_size_rampup=4,5,100"],
        ["training.batch_size_rampup=(4, 5, 100)", "training.global_batch_size=16", "choose"],
    ),
    "sequence": (
        ["--mesh.data=4", "--mesh.context=2", "--training.sequence_length=255"],
        ["training.sequence_length=255", "mesh.context", "--training.sequence_length=256"],
    ),
    "sequence over tensor": (
        ["--mesh.data=4", "--mesh.tensor=2", "--training.sequence_length=255"],
        ["training.sequence_length=255", "tensor(2)", "--training.sequence_length=256"],
    ),
    "heads over context": (
        ["--mesh.data=1", "--mesh.context=8", "--execution.context_attention=all_to_all"],
        ["is not divisible by 8", "use --execution.context_attention=ring"],
    ),
    "sequence and learned positions": (
        ["--model.position=learned", "--training.sequence_length=512"],
        ["training.sequence_length=512", "model.max_positions=256", "--model.max_positions=512"],
    ),
    "sequence and attention dropout": (
        ["--model.attention_dropout=0.1", "--training.sequence_length=131072"],
        ["model.attention_dropout=0.1", "training.sequence_length=131072", "--model.attention_dropout=0"],
    ),
    "mesh too large": (["--mesh.data=16"], ["data(16)", "8", "--mesh.data=-1"]),
    "mesh too small": (["--mesh.data=2", "--mesh.tensor=2"], ["data(2) * tensor(2)", "8", "--mesh.data=-1"]),
    "mesh that does not divide": (["--mesh.data=-1", "--mesh.fsdp=3", "--model.embed_dim=192"], ["fsdp(3)", "8"]),
    "two free axes": (["--mesh.data=-1", "--mesh.fsdp=-1"], ["mesh.data=-1", "mesh.fsdp=-1", "fix one"]),
    "no such size": (["--mesh.expert=0"], ["mesh.expert=0", "positive"]),
    "pipeline of one microbatch": (
        ["--mesh.data=4", "--mesh.pipeline=2"],
        ["mesh.pipeline=2", "training.microbatch_size=None", "use --training.microbatch_size=1"],
    ),
    "stages without layers": (
        ["--mesh.pipeline=8", "--training.microbatch_size=1"],
        ["mesh.pipeline=8", "model.num_layers=4", "--mesh.pipeline_layout"],
    ),
    "pipeline layout": (
        ["--mesh.data=4", "--mesh.pipeline=2", "--mesh.pipeline_layout=tt|t", "--training.microbatch_size=1"],
        ["mesh.pipeline_layout=tt|t", "3 layers in 2 stages", "model.num_layers=4"],
    ),
    "letters of a pipeline layout": (
        ["--mesh.data=4", "--mesh.pipeline=2", "--mesh.pipeline_layout=Ett|ttxL", "--training.microbatch_size=1"],
        ["mesh.pipeline_layout=Ett|ttxL", "'x' is unknown"],
    ),
    "virtual stages without a pipeline": (
        ["--mesh.virtual_stages=2"],
        ["mesh.virtual_stages=2", "there is no pipeline", "set --mesh.pipeline"],
    ),
    "loop of layers in a pipeline": (
        ["--mesh.data=4", "--mesh.pipeline=2", "--execution.scan_layers=True", "--training.microbatch_size=1"],
        ["execution.scan_layers=True", "remove it"],
    ),
    "offload in a pipeline": (
        ["--mesh.data=4", "--mesh.pipeline=2", "--execution.offload=residual", "--training.microbatch_size=1"],
        ["execution.offload=residual", "--execution.recompute=full"],
    ),
    "missing data set": (
        ["--data.source=indexed", "--data.paths=nowhere/corpus"],
        ["data.paths", "nowhere/corpus.bin does not exist", "megajax.data.preprocess"],
    ),
    "missing text": (
        ["--data.source=text", "--data.tokenizer=bytes", "--data.text=nowhere/*.txt"],
        ["data.text", "nowhere/*.txt", "stdlib"],
    ),
    "missing tokenizer": (["--data.tokenizer=nowhere.model"], ["data.tokenizer=nowhere.model", "does not exist"]),
    "prompt that the tokenizer cannot encode": (
        ["--training.sample_prompt=def "],
        ["training.sample_prompt='def '", "null:2047", "use --training.sample_prompt="],
    ),
    "vocabulary of the tokenizer": (
        ["--data.tokenizer=null:4000", "--model.vocab_size=2048"],
        ["model.vocab_size=2048", "data.tokenizer", "--model.vocab_size="],
    ),
    "offload without the loop": (
        ["--execution.offload=residual", "--execution.scan_layers=False"],
        ["execution.offload=residual", "loop", "remove --execution.scan_layers=False"],
    ),
    "compiler option without a value": (
        ["--execution.compiler_options=xla_gpu_enable_triton_gemm"],
        ["execution.compiler_options", "xla_gpu_enable_triton_gemm", "xla_NAME=VALUE"],
    ),
    "compiler option that jaxlib does not know": (
        ["--mesh.data=8", "--execution.compiler_options=xla_gpu_colour=3"],
        ["execution.compiler_options", "xla_gpu_colour=3", "leave it out"],
    ),
    "module to recompute": (
        ["--execution.recompute=norm,mlp_act"],
        ["execution.recompute=norm,mlp_act: 'mlp_act'", "core_attention"],
    ),
    "no module to recompute": (
        ["--execution.recompute="],
        ["execution.recompute=:", "none, selective, full"],
    ),
    "every zeroth layer": (
        ["--execution.recompute=full", "--execution.recompute_every=0"],
        ["execution.recompute_every=0", "at least 1"],
    ),
    "every second layer of nothing": (
        ["--execution.recompute_every=2"],
        ["execution.recompute_every=2", "--execution.recompute=full"],
    ),
    "activation to offload": (["--execution.offload=residual,mlp"], ["execution.offload: 'mlp'", "mlp_wide"]),
    "dropout": (["--model.dropout=1"], ["model.dropout=1.0", "below 1"]),
    "warm-up": (["--optimizer.warmup_steps=400"], ["optimizer.warmup_steps=400", "400"]),
    "annealing steps without annealing": (
        ["--optimizer.wsd_decay_steps=20"],
        ["optimizer.wsd_decay_steps=20", "optimizer.schedule=linear", "use --optimizer.schedule=wsd"],
    ),
    "loss scale without fp16": (
        ["--optimizer.loss_scale=65536,1,1000,2"],
        [
            "optimizer.loss_scale=65536,1,1000,2", "precision.recipe=bf16", "use --precision.recipe=fp16",
            "--optimizer.loss_scale=4294967296,1,1000,2",
        ],
    ),
    "cautious decay of SGD": (
        ["--optimizer.cautious_decay=True", "--optimizer.groups=embedding optimizer=sgd"],
        ["optimizer.cautious_decay=True", "SGD", "--optimizer.cautious_decay=False"],
    ),
    "parameters to leave out of nothing": (
        ["--checkpoint.start_fresh=head"],
        ["checkpoint.start_fresh=head", "set --checkpoint.start_from, or use --checkpoint.start_fresh="],
    ),
    "masking of documents": (
        ["--task.mask_probability=0.3"],
        ["--task.mask_probability is a field of task.kind=masked and spans, not of task.kind=language; leave it out"],
    ),
    "a field that has moved to the task": (["--data.kind=spans"], ["--data.kind is now --task.kind"]),
    "an unknown task": (["--task.kind=documents"], ["task.kind=documents is unknown", "language"]),
    "profile after the end": (
        ["--training.steps=150", "--launch.profile_steps=200,205"],
        ["launch.profile_steps=200,205", "training.steps=150", "profile earlier steps"],
    ),
}  # fmt: skip


def refusal(arguments: list[str], run_dir: Path) -> str:
    with pytest.raises(ValueError) as error:
        train.main(["--config=gpt_tiny", f"--run_dir={run_dir}", f"--data.cache_dir={run_dir.parent}", *arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fault
def test_bad_input_is_one_line_with_the_way_out_and_no_run_directory(case, tmp_path):
    arguments, words = CASES[case]
    message = refusal([*MOCK, *arguments], tmp_path / "run")
    for word in words:
        assert word in message
    assert not (tmp_path / "run").exists()


def test_no_recipe_and_unknown_recipe():
    with pytest.raises(ValueError, match="--list_configs"):
        train.main(["--model.num_layers=2"])
    with pytest.raises(ValueError, match="did you mean gpt_tiny"):
        train.main(["--config=gpt_tinny"])


def test_unknown_device_to_plan_for():
    with pytest.raises(ValueError, match="--plan=h1000 is unknown; use one of h100"):
        train.main(["--config=gpt_tiny", "--plan=h1000"])


def test_empty_run_directory_is_that_of_the_recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_train", lambda config, *_: config.run_dir)
    train.main(["--config=gpt_tiny", "--run_dir=", *MOCK])
    assert [str(path) for path in Path().iterdir()] == ["runs"] and Path("runs/gpt_tiny").is_dir()


def test_a_run_may_go_on_with_another_way_to_compute_the_same(tmp_path):
    config = configs.recipe("gpt_tiny")
    (tmp_path / "config.json").write_text(config.to_json())
    same = ["--execution.context_attention=all_gather", "--execution.recompute=full", "--execution.scan_layers=True"]
    changed = run.check(override(config, [*same, f"--run_dir={tmp_path}"]))
    assert sorted(line.split(":")[0] for line in changed if "run_dir" not in line) == [
        "execution.context_attention", "execution.recompute", "execution.scan_layers"
    ]  # fmt: skip
    for other in ("--model.window=8", "--precision.params=bfloat16", "--optimizer.name=lion"):
        with pytest.raises(ValueError, match=f"cannot resume with other settings .{other[2:].split('=')[0]}: "):
            run.check(override(config, [other, f"--run_dir={tmp_path}"]))


@pytest.mark.fault
def test_a_run_on_other_data_is_refused_unless_it_is_allowed(tmp_path):
    config = override(configs.recipe("gpt_tiny"), [*MOCK, f"--run_dir={tmp_path}", "--mesh.data=1"])
    record = run.load_data(config).record
    (tmp_path / "data.json").write_text(json.dumps(record))
    run.load_data(config)
    (tmp_path / "data.json").write_text(json.dumps(record | {"seed": 1}))
    with pytest.raises(ValueError, match="other data, as .*data.json says .training.seed: 1 -> 1234.*allow_change"):
        run.load_data(config)
    run.load_data(override(config, ["--data.allow_change=True"]))
    for damaged in ("", "[3]", "{", "\ud800"):
        (tmp_path / "data.json").write_text(damaged, errors="surrogatepass")
        with pytest.raises(ValueError, match="data.json cannot be read .*--data.allow_change=True"):
            run.load_data(config)


def test_run_directory_of_another_model_is_left_as_it_is(tmp_path):
    other = configs.recipe("gpt2_124m")
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "config.json").write_text(other.to_json())
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    before = contents(tmp_path)
    message = refusal(MOCK, tmp_path)
    assert "holds a run that cannot resume" in message and "model.num_layers: 12 -> 4" in message
    assert "use another --run_dir" in message
    after = contents(tmp_path)
    after.pop(str(tmp_path / ".lock"), None)
    assert after == before


def test_run_directory_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("precious")
    assert "cannot be written" in refusal(MOCK, tmp_path / "run")
    assert (tmp_path / "run").read_text() == "precious"


def test_run_directory_is_free_again_after_a_refusal(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    refusal([*MOCK, "--mesh.data=3"], run_dir)
    monkeypatch.setattr(run, "_train", lambda *_: "interrupted")
    train.main(["--config=gpt_tiny", f"--run_dir={run_dir}", *MOCK])


def test_dropout_counters_of_a_long_sequence():
    config = DecoderConfig(attention_dropout=0.1, position="rope")
    config.check(MeshConfig(), 65536, ExecutionConfig())
    with pytest.raises(ValueError, match="attention_dropout"):
        config.check(MeshConfig(), 65537, ExecutionConfig())
    DecoderConfig(attention_dropout=0.0, position="rope").check(MeshConfig(), 65537, ExecutionConfig())


# ----------------------------------------------------------------------------- as a person meets it


def command_line(arguments: list[str | Path]) -> tuple[int, str, str, float]:
    """-> (exit code, stdout, stderr, seconds of a processor) of python with these arguments and one CPU device."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout, done.stderr, seconds


@pytest.fixture(scope="module")
def seconds_of_imports() -> float:
    """What importing the libraries takes here and now, about 3 seconds: most of what a refusal takes."""
    code, _, err, seconds = command_line(["-c", "import jax, flax.nnx, optax, orbax.checkpoint"])
    assert code == 0, err
    return seconds


def check_refused_on_the_command_line(arguments: list[str], tmp_path: Path, start: str, most_seconds: float) -> None:
    before = contents(tmp_path)
    code, out, err, seconds = command_line(
        [ROOT / "train.py", "--config=gpt_tiny", f"--run_dir={tmp_path / 'run'}", *MOCK, *arguments]
    )
    assert (code, out) == (2, "")
    assert err.startswith(start) and err.count("\n") == 1 and "\x1b" not in err, err
    assert contents(tmp_path) == before
    assert seconds < most_seconds


@pytest.mark.parametrize(
    "argument",
    [
        "--config=gpt_tinny",
        "--training.batch_size_rampup=4,4",
        "--mesh.data=3",
        "--data.text=nowhere",
        "--data.text=nowhere\nmegajax: finished\x1b[31m",  # a name that forges a line of the log
    ],
)
def test_command_prints_one_line_and_exits_with_2_soon_after_the_imports(argument, tmp_path, seconds_of_imports):
    check_refused_on_the_command_line([argument], tmp_path, "error: ", 2.5 * seconds_of_imports)


def test_run_directory_in_use_by_another_process(tmp_path, seconds_of_imports):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = f"error: run_dir={tmp_path / 'run'} is in use by another"
        check_refused_on_the_command_line([], tmp_path, start, 2.5 * seconds_of_imports)
