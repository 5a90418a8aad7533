"""What a person types becomes the config they meant, or one line that says why not."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest

import configs
from megajax import run
from megajax.config import Config, differences, incompatibilities
from megajax.data.config import DataConfig
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.tokenizers.load import load_tokenizer
from megajax.models.interface import MODELS
from megajax.overrides import RENAMED, override
from megajax.tasks.interface import TASKS
from megajax.training.config import LaunchConfig

RECIPES = configs.recipes()


def field_names(config, prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            names += field_names(value, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names


def value_of(config: Config, name: str):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--model.num_layers=2"], "model.num_layers", 2),
        (["--mesh.data=-1"], "mesh.data", -1),
        (["--mesh.data", "-1"], "mesh.data", -1),
        (["--optimizer.learning_rate=1e-3"], "optimizer.learning_rate", 1e-3),
        (["--launch.exit_after_minutes=0.5"], "launch.exit_after_minutes", 0.5),
        (["--launch.exit_after_minutes=none"], "launch.exit_after_minutes", None),
        (["--model.biases=mlp"], "model.biases", ("mlp",)),
        (["--model.biases="], "model.biases", ()),
        (["--model.attention_sinks=true"], "model.attention_sinks", True),
        (["--model.tied_embeddings", "true"], "model.tied_embeddings", True),
        (["--execution.scan_layers=True"], "execution.scan_layers", True),
        (["--execution.scan_layers=None"], "execution.scan_layers", None),
        (["--model.num_kv_heads=2"], "model.num_kv_heads", 2),
        (["--model.mlp_dim=None"], "model.mlp_dim", None),
        (["--model.rope.scaling=llama3"], "model.rope.scaling", "llama3"),
        (["--model.rope.scaling", "yarn"], "model.rope.scaling", "yarn"),
        (["--data.eval_paths=a,b/c-d"], "data.eval_paths", ("a", "b/c-d")),
        (["--data.eval_paths", "a", "b"], "data.eval_paths", ("a", "b")),
        (["--data.text="], "data.text", ()),
        (["--data.split=9,0.5,0"], "data.split", (9.0, 0.5, 0.0)),
        (["--training.batch_size_rampup=4,4,64"], "training.batch_size_rampup", (4, 4, 64)),
        (["--training.batch_size_rampup=None"], "training.batch_size_rampup", None),
        (["--training.global-batch-size=32"], "training.global_batch_size", 32),
        (["--run-dir=a folder/x=y"], "run_dir", "a folder/x=y"),
        (["--run_dir=None"], "run_dir", "None"),
        (["--model.num_layers=2", "--model.num_layers=3"], "model.num_layers", 3),
    ],
)
def test_override_sets_the_field_and_no_other(arguments, field, value):
    config = configs.recipe("gpt_tiny")
    changed = override(config, arguments)
    assert value_of(changed, field) == value and type(value_of(changed, field)) is type(value)
    assert all(line.startswith(f"{field}: ") for line in differences(config, changed))


def test_several_overrides_at_once():
    changed = override(
        configs.recipe("llama3_8b"), ["--model.num_layers", "2", "--data.tokenizer=bytes", "--mesh.fsdp=1"]
    )
    assert (changed.model.num_layers, changed.data.tokenizer, changed.mesh.fsdp) == (2, "bytes", 1)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--training.steps=1.5", ["training.steps", "'1.5'", "a whole number"]),
        ("--training.steps=1e3", ["training.steps", "a whole number"]),
        ("--training.steps=", ["training.steps", "a whole number"]),
        ("--optimizer.learning_rate=fast", ["optimizer.learning_rate", "'fast'", "a finite number"]),
        ("--model.tied_embeddings=1", ["model.tied_embeddings", "True or False"]),
        ("--model.num_kv_heads=few", ["model.num_kv_heads", "a whole number (int32), at least 1, or None"]),
        (
            "--model.rope.scaling=llama4",
            ["model.rope.scaling", "one of none, linear, dynamic, llama3, yarn, yarn_exact, longrope"],
        ),
        (
            "--training.batch_size_rampup=4,4",
            [
                "training.batch_size_rampup",
                "3 values, separated by commas: a whole",
                "at least 1; ",
                "at least 0, or None",
            ],
        ),
        (
            "--model.rope.factors=0.3,x",
            ["rope.factors", "a list of finite numbers (float32), separated by commas, above 0"],
        ),
        ("--data.split=1,2", ["data.split", "3 finite numbers (float32), separated by commas, at least 0"]),
        (
            "--optimizer.loss_scale=1,1",
            ["4 values, separated by commas: a finite", "; a whole number (int32), at least"],
        ),
    ],
)
def test_wrong_type_names_the_field_and_what_is_expected_in_one_line(argument, words, capfd):
    with pytest.raises(ValueError) as error:
        override(configs.recipe("gpt_tiny"), [argument])
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("--modle.num_layers=3", "--model.num_layers"),
        ("--model.numlayers=3", "--model.num_layers"),
        ("--num_layers=3", "--model.num_layers"),
        ("--trainer.steps=3", "--training.steps"),
        ("--model.rope.bass=3", "--model.rope.base"),
        ("--rundir=x", "--run_dir"),
    ],
)
def test_unknown_field_names_the_nearest(argument, nearest):
    with pytest.raises(ValueError, match=f"did you mean {nearest}"):
        override(configs.recipe("gpt_tiny"), [argument])


def test_field_of_another_kind_of_model_names_that_kind():
    with pytest.raises(ValueError, match="--model.mamba.chunk is a field of model.kind=hybrid, not of .*=decoder"):
        override(configs.recipe("gpt_tiny"), ["--model.mamba.chunk=64"])


@pytest.mark.parametrize("arguments", [["stray"], ["-x=3"], ["--model.biases"]])
def test_what_is_no_override_is_refused(arguments):
    with pytest.raises(ValueError, match=re.escape(arguments[0])) as error:
        override(configs.recipe("gpt_tiny"), arguments)
    assert "\n" not in str(error.value)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="--config=lama3_8b is unknown; did you mean llama3_8b"):
        configs.recipe("lama3_8b")


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip_is_equality(name):
    config = configs.recipe(name)
    assert Config.from_json(config.to_json()) == config
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, batch_size_rampup=(1, 1, 3)),
        launch=LaunchConfig(profile_steps=(2, 4)),
        data=dataclasses.replace(config.data, paths=("0.5", "a", "1.5", "b")),
    )
    assert Config.from_json(config.to_json()) == config


DAMAGED = {
    "cut": "{",
    "empty": "",
    "not text": "\udcff",
    "a list": "[]",
    "no sections": '{"model": 3}',
    "unknown field": '{"model": {"colour": 3}}',
    "unknown section": '{"models": {}}',
    "text for a number": '{"model": {"num_layers": "2"}}',
    "a fraction for a whole number": '{"model": {"num_layers": 2.5}}',
    "a truth value for a number": '{"model": {"num_layers": true}}',
    "a number for a truth value": '{"model": {"bias": 1}}',
    "a number for a list": '{"data": {"paths": 3}}',
    "text for a list": '{"data": {"paths": "ab"}}',
    "a list of others": '{"data": {"weights": ["a"]}}',
    "too short a list": '{"data": {"split": [1.0]}}',
    "not one of these": '{"precision": {"compute": "float17"}}',
    "unknown kind": '{"model": {"kind": "perceiver"}}',
    "kind of another type": '{"model": {"kind": []}}',
    "a section within": '{"model": {"rope": 3}}',
    "None": '{"training": {"steps": null}}',
    "an old field of another type": '{"execution": {"recompute": "selective", "recompute_modules": 3}}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_config_of_a_run_is_one_line_with_its_path(text, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="config.json cannot be read") as error:
        Config.load(tmp_path)
    assert "\n" not in str(error.value)


def test_differences_name_each_changed_field_with_both_values():
    config = configs.recipe("gpt_tiny")
    assert differences(config, config) == []
    changed = override(config, ["--model.rope.base=5", "--training.steps=70", "--run_dir=x"])
    assert differences(config, changed) == [
        "model.rope.base: 10000.0 -> 5.0",
        "training.steps: 80 -> 70",
        "run_dir: runs/gpt_tiny -> x",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_on_its_mesh_and_says_how_to_run_it(name):
    config = configs.recipe(name)
    config.check()
    sizes = [size for size in config.mesh.sizes().values() if size != -1]
    num_devices = 1
    for size in sizes:
        num_devices *= size
    config.check_on(num_devices)
    assert config.run_dir == f"runs/{name}"
    assert "Hardware:" in RECIPES[name].__doc__ and f"train.py --config={name}" in RECIPES[name].__doc__


def test_number_of_fields_stays_readable():
    """Latent attention and multi-token prediction took six, all of them sizes or weights that checkpoints differ in."""
    assert len(field_names(Config())) <= 180


def test_every_field_has_help():
    def check(kind):
        lines = (
            Path(__import__(kind.__module__, fromlist=["_"]).__file__).read_text().split(f"class {kind.__name__}")[1]
        )
        for field in dataclasses.fields(kind):
            if field.name in kind.__annotations__ and not dataclasses.is_dataclass(field.type):
                assert re.search(rf'    {field.name}: .*\n    """', lines), f"{kind.__name__}.{field.name}"

    sections = [value for value in vars(Config()).values() if dataclasses.is_dataclass(value)]
    assert len(sections) == 12
    for kind in {*map(type, sections), *MODELS.all().values(), *TASKS.all().values()}:
        if not kind.__module__.startswith("test"):
            check(kind)


def test_a_field_that_has_moved_is_refused_with_its_new_name():
    with pytest.raises(ValueError, match="--model.recompute is now --execution.recompute"):
        override(configs.recipe("gpt_tiny"), ["--model.recompute=full"])


def test_every_field_that_has_moved_is_at_its_documented_place():
    names = set(field_names(Config())).union(*(field_names(Config(task=task())) for task in TASKS.all().values()))
    assert not RENAMED.keys() & names
    assert {new.partition("=")[0] for new in RENAMED.values()} <= names


def test_a_resume_compares_what_the_model_is_and_lets_the_rest_change():
    config = configs.recipe("gpt_tiny")
    change = lambda *words: incompatibilities(config, override(config, list(words)))
    assert not change("--execution.recompute=full", "--model.dropout=0.1", "--training.z_loss=1", "--mesh.tensor=2")
    assert not change("--launch.exit_at_step=3", "--optimizer.learning_rate=1", "--precision.compute=bfloat16")
    assert change("--model.num_layers=5", "--precision.params=bfloat16") == [
        "model.num_layers: 4 -> 5", "precision.params: float32 -> bfloat16",
    ]  # fmt: skip
    assert change("--training.frozen=embedding") == ["training.frozen: () -> ('embedding',)"]


def test_unknown_kind_of_model_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="model.kind=perceiver is unknown; use one of .*decoder"):
        override(configs.recipe("gpt_tiny"), ["--model.kind=perceiver"])
    with pytest.raises(ValueError, match="model.kind=perceiver is unknown"):
        Config.from_json('{"model": {"kind": "perceiver"}}')


def test_only_text_keeps_the_tokenizer_of_the_recipe():
    folder = DataConfig(source="indexed", paths=("a",), tokenizer="dir/tokenizer.json")
    assert folder.of_source("text") == DataConfig(source="text", tokenizer="dir/tokenizer.json")
    assert folder.of_source("mock") == DataConfig(source="mock")
    assert DataConfig(source="mock", tokenizer="null:99").of_source("text") == DataConfig(source="text")


def test_own_data_need_only_their_paths(tmp_path, caplog):
    """What gpt_tiny says of its own text, tokenizer and length does not stand in the way of what is typed."""
    caplog.set_level(logging.INFO, "megajax")
    (tmp_path / "a.txt").write_text("3000 1 2 " * 100)
    preprocess([str(tmp_path / "a.txt")] * 8, str(tmp_path / "x"), load_tokenizer("null:3001"), "null:3001")
    recipe = override(configs.recipe("gpt_tiny"), ["--training.steps=400", "--optimizer.warmup_steps=30"])
    typed = [f"--data.paths={tmp_path / 'x.bin'}", "--training.steps=20"]
    config = override(recipe, typed).check_on(1)
    assert config.data.source == "indexed"
    assert "data.source='indexed', implied by data.paths (the recipe has 'text')" in caplog.text
    assert override(config, {"data.text": ["docs"], "data.tokenizer": "bytes"}).data == DataConfig(
        source="text", text=("docs",), tokenizer="bytes"
    )
    assert config.data.text == () and config.data.tokenizer == "null:3001"
    assert config.model.vocab_size == 3001 and config.optimizer.warmup_steps == 1
    assert "model.vocab_size=3001, adapted to the overrides (the recipe has 2048)" in caplog.text
    assert "optimizer.warmup_steps=1, adapted to the overrides (the recipe has 30)" in caplog.text
    # What is typed stays as it is, and is refused if it contradicts something else that is typed.
    for argument, message in {
        "--data.text=stdlib": "data.paths=.* is not read with data.source=text; use --data.source=indexed",
        "--data.source=mock": "data.paths=.* is not read with data.source=mock",
        "--optimizer.warmup_steps=20": "optimizer.warmup_steps=20 must be less",
    }.items():
        with pytest.raises(ValueError, match=message):
            override(recipe, [*typed, argument]).check_on(1)
    assert override(recipe, [*typed, "--model.vocab_size=2048"]).model.vocab_size == 2048
    assert config.training.sample_prompt == ""  # the files do not name a tokenizer that could encode it
    mock = override(recipe, ["--data.source=mock"]).check_on(1)
    assert (mock.data.tokenizer, mock.training.sample_prompt) == ("null:2048", "")


def test_text_that_is_read_many_times_is_warned_of(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("some text " * 100)
    preprocess([str(tmp_path / "a.txt")] * 8, str(tmp_path / "x"), load_tokenizer("bytes"), "bytes")
    typed = ["--data.source=indexed", f"--data.paths={tmp_path / 'x'}", f"--data.cache_dir={tmp_path}"]
    for steps, is_warned in ((1, False), (100, True)):
        length = [f"--training.steps={steps}", f"--run_dir={tmp_path / 'run'}"]
        run.load_data(override(configs.recipe("gpt_tiny"), [*typed, *length]).check_on(1))
        assert ("x, 7.01k tokens, is read 58.5 times" in caplog.text) == is_warned
