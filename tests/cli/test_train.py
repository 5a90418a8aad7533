"""What a person meets before a run starts: help, lists, hints, and resuming by the run directory alone."""

import dataclasses
import re
import signal
import subprocess
import sys

import pytest

import configs
from megajax import cli, run
from megajax.cli import completion, infer, train
from megajax.config import Config
from megajax.fields.suggestions import did_you_mean
from megajax.overrides import override
from megajax.training.config import LaunchConfig
from megajax.training.reporting import best_effort

PYTHON = [sys.executable, "-c"]


def printed(capsys, *arguments: str) -> str:
    train.main(list(arguments))
    return capsys.readouterr().out


# ----------------------------------------------------------------------------- help


def test_help_of_a_recipe_shows_every_option_as_it_is_typed_with_its_range(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = printed(capsys, "--config=gpt_tiny", "--help")
    options = set(re.findall(r"(?<= )--(\w[\w.\-]*)", text))
    assert {"config", "plan", "replay_step", "list_configs", "run_dir", "training.global_batch_size"} <= options
    assert {name for name in options if "-" in name} == {"no-list_configs", "no-config_schema"}
    assert not set("│╭╮╰╯─").intersection(text)
    joined = " ".join(text.split())
    assert (
        "Dropout rate of the embeddings and of the outputs of attention and MLP. Must be at least 0 and below 1."
        in joined
    )
    assert "(default: runs/gpt_tiny)" in joined and "(default: 80)" in joined
    # A docstring of two lines is one paragraph.
    assert "tokens between layers (sequence parallelism, Korthikanti et al. 2022)" in joined


def test_help_without_a_recipe_names_every_field(capsys):
    text = printed(capsys, "--help")
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default):
            assert f"  {section.name}." in text
            assert all(f" {field.name}" in text for field in dataclasses.fields(section.default))
    assert "--config=gpt_tiny --help" in text and "--replay_step" in text


def test_list_of_recipes_is_aligned(capsys):
    lines = printed(capsys, "--list_configs").splitlines()
    names = [line.split()[0] for line in lines]
    assert names == list(configs.recipes())
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_a_narrow_terminal_breaks_no_word_of_the_list_of_recipes(capsys, monkeypatch):
    whole = printed(capsys, "--list_configs").splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = printed(capsys, "--list_configs").splitlines()
    assert len(lines) > len(whole) and all(len(line) <= 80 for line in lines)
    assert " ".join(lines).split() == " ".join(whole).split()
    column = whole[0].index(" A ") + 1
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)


def test_recipes_are_read_from_their_source_as_they_are_when_imported():
    assert {name: recipe.__doc__.splitlines()[0] for name, recipe in configs.recipes().items()} == {
        name: text.splitlines()[0] for name, text in configs.docstrings().items()
    }


@pytest.mark.parametrize(
    "arguments", [["--list_configs"], ["--config=gpt_tinny"], ["--model.num_layers=2"]], ids=lambda words: words[0]
)
def test_lists_and_the_first_errors_do_not_import_jax(arguments):
    script = f"""
import sys
from megajax.cli import train
try:
    train.main({arguments})
except ValueError:
    pass
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([*PYTHON, script], check=True, capture_output=True)


def test_an_error_in_a_config_comes_before_the_slow_imports_that_training_needs():
    script = """
import sys
from megajax.cli import train
try:
    train.main(["--config=gpt_tiny", "--model.num_heads=3"])
except ValueError as error:
    assert "num_heads=3" in str(error)
slow = {"jax.experimental.mosaic", "orbax", "grain", "matplotlib", "tensorstore"}
assert not slow.intersection(sys.modules), slow.intersection(sys.modules)
"""
    subprocess.run([*PYTHON, script], check=True, capture_output=True)


# ----------------------------------------------------------------------------- did you mean


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("optimizer.wd", "optimizer.weight_decay"),
        ("training.batch_size", "training.global_batch_size"),
        ("batch_size", "training.global_batch_size"),
        ("bs", "training.global_batch_size"),
        ("training.seq_len", "training.sequence_length"),
        ("seq_len", "training.sequence_length"),
        ("num_train_epochs", "training.epochs"),
        ("training.max_steps", "training.steps"),
        ("epochs", "training.epochs"),
        ("model.hidden_size", "model.embed_dim"),
        ("model.layers", "model.num_layers"),
        ("mesh.tp", "mesh.tensor"),
        ("model.tokenizer", "data.tokenizer"),
        ("output_dir", "run_dir"),
    ],
)
def test_hint_knows_what_other_programs_call_a_field(typed, meant):
    with pytest.raises(ValueError, match=f"--{typed} is unknown; did you mean --{meant}[?]"):
        override(configs.recipe("gpt_tiny"), [f"--{typed}=3"])


def test_no_hint_where_nothing_is_near():
    assert did_you_mean("colour_of_the_sky", ["run_dir", "mesh.data"]) == "" == did_you_mean("x", [])


def test_infer_hints_at_its_options():
    with pytest.raises(ValueError, match="--max_new_tokens=3 is unknown; did you mean --max_tokens"):
        infer.main(["generate", "--run=x", "--prompt=x", "--max_new_tokens=3"])


# ----------------------------------------------------------------------------- resuming


def test_run_directory_alone_resumes_with_the_saved_config(tmp_path, monkeypatch):
    saved = override(
        configs.recipe("gpt_tiny"),
        {
            "model.embed_dim": 64,
            "training.steps": 7,
            "launch.exit_at_step": 3,
            "optimizer.warmup_steps": 0,
            "data.text": ("a", "b"),
        },
    )
    (tmp_path / "config.json").write_text(saved.to_json())
    started = []
    monkeypatch.setattr(run, "train", lambda config: started.append(config) or "interrupted")
    train.main([f"--run_dir={tmp_path}"])
    train.main(["--training.steps=9", "--run-dir", str(tmp_path)])
    want = dataclasses.replace(saved, run_dir=str(tmp_path), launch=LaunchConfig())
    assert started == [want, override(want, ["--training.steps=9"])]


def test_run_directory_without_a_run_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=f"run_dir={tmp_path} holds no run to resume; begin one with --config=NAME"):
        train.main([f"--run_dir={tmp_path}"])


def test_a_hugging_face_folder_is_no_run_to_resume(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=f"begin one with --config=hugging_face:{tmp_path}$"):
        train.main([f"--run_dir={tmp_path}"])


# ----------------------------------------------------------------------------- the mesh and the devices


@pytest.mark.parametrize(
    ("recipe", "sizes", "devices", "ways"),
    [
        ("gpt_tiny", {"data": 2}, 1, "use --mesh.data=-1 for the rest of the devices, start with 2 devices, or try"),
        ("gpt_tiny", {"data": 2, "tensor": 4}, 2, "--mesh.tensor=-1 for the rest"),
        (
            "gpt_tiny",
            {"data": 2, "tensor": 3},
            1,
            "devices, 1; start with 6 devices, or try the mesh on a CPU: --launch",
        ),
        ("gpt_tiny", {"tensor": 4}, 1, "devices, 1; start with a multiple of 4 devices, or try"),  # data is -1 already
        ("llama3_70b", {}, 1, "devices, 1; start with 64 devices, or see what the run needs: --plan; recipes that end"),
    ],
)
def test_a_mesh_that_does_not_match_gets_only_advice_that_helps(recipe, sizes, devices, ways):
    config = override(configs.recipe(recipe), {f"mesh.{axis}": size for axis, size in sizes.items()})
    with pytest.raises(ValueError, match=re.escape(ways)):
        config.check_on(devices)


def test_an_axis_that_takes_the_rest_of_the_devices_replaces_that_of_the_recipe(caplog):
    caplog.set_level("INFO", "megajax")
    config = override(configs.recipe("gpt_tiny"), ["--mesh.fsdp=-1"]).check_on(8)
    assert (config.mesh.data, config.mesh.fsdp) == (1, 8)
    assert "mesh.data=1, adapted to the overrides (the recipe has -1)" in caplog.text
    with pytest.raises(ValueError, match="only one axis may take the remaining devices"):
        override(configs.recipe("gpt_tiny"), ["--mesh.fsdp=-1", "--mesh.data=-1"]).check()


def test_virtual_devices_of_a_cpu_are_asked_for_by_the_error_and_by_a_field(tmp_path, monkeypatch):
    arguments = ["--config=gpt_tiny", f"--run_dir={tmp_path}", "--mesh.data=2", "--mesh.tensor=2"]
    with pytest.raises(ValueError, match="try the mesh on a CPU: --launch.cpu_devices=4"):
        override(configs.recipe("gpt_tiny"), arguments[1:]).check_on(1)
    monkeypatch.delenv("XLA_FLAGS")
    script = """
import sys
from megajax import run
from megajax.cli import train
run.train = lambda config: print(config.check_on(run.jax.device_count()).mesh.num_devices) or "interrupted"
train.main(sys.argv[1:])
"""
    done = subprocess.run([*PYTHON, script, *arguments, "--launch.cpu_devices=4"], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr


# ----------------------------------------------------------------------------- the console script


def console(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """-> (exit status, stdout, stderr) of megajax with these words."""
    monkeypatch.setattr(sys, "argv", ["megajax", *words])
    monkeypatch.setattr(best_effort, "print_what_can_be_printed", lambda: None)  # it replaces sys.stdout for good
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status, *capsys.readouterr()


def test_console_script_runs_each_command(monkeypatch, capsys):
    status, out, _ = console(monkeypatch, capsys, "--help")
    assert status == 0 and all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert "error: megajax trian is unknown; did you mean train?" in console(monkeypatch, capsys, "trian")[2]
    assert console(monkeypatch, capsys, "configs")[1].startswith("gpt_tiny ")
    assert set(re.findall(r"^  (\w+)  ", infer.__doc__, re.MULTILINE)) < cli.COMMANDS.keys()
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("--help", *(cli.COMMANDS.keys() - {"configs"})):
        words = [name] if name == "--help" else [name, "--help"]
        status, out, _ = console(monkeypatch, capsys, *words)
        assert (status, bool(out)) == (0, True), name
        assert not [line for line in out.splitlines() if len(line) > 80], name
    assert console(monkeypatch, capsys, "train", "--config=gpt_tinny")[0] == 2
    planned = console(monkeypatch, capsys, "plan", "--config=gpt_tiny", "--plan=a100")
    assert planned[0] == 0 and planned[1].startswith("plan of gpt_tiny") and "1 x A100" in planned[1]


def test_completion_knows_commands_recipes_and_options(capsys):
    with pytest.raises(SystemExit) as end:
        completion.main(["bash"])  # tyro writes those of other shells from the same description
    script = capsys.readouterr().out
    assert end.value.code in (0, None)
    for word in ("preprocess", "llama3_70b", "training.global_batch_size", "rope.scaling", "temperature", "prompt"):
        assert word in script


def test_unknown_shell_is_refused():
    with pytest.raises(ValueError, match="name one shell: bash, zsh"):
        completion.main(["powershell"])
