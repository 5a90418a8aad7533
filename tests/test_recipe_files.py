"""Recipes in files of the user: read as the command line is, saved as they are, described for editors."""

import dataclasses
import sys

import pytest
import yaml

import configs
from megajax import recipe_files
from megajax.cli import train
from megajax.config import Config

OWN = """
import dataclasses

import configs


def wide():
    return dataclasses.replace(configs.recipe("gpt_tiny"), run_dir="")


def number():
    return 5
"""


def write(path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_every_recipe_is_the_same_from_the_file_it_is_saved_in(tmp_path):
    validator = pytest.importorskip("jsonschema").Draft7Validator(recipe_files.schema())
    for name in configs.recipes():
        path = str(tmp_path / f"{name}.yaml")
        config = configs.recipe(name)
        recipe_files.write(config, path)
        assert configs.recipe(path) == config
        validator.validate(yaml.safe_load((tmp_path / f"{name}.yaml").read_text()))


def test_a_file_changes_the_recipe_that_it_starts_from(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "base.yaml", "config: gpt_tiny\ntraining:\n  steps: 70\n  microbatch_size: 2\n")
    path = write(
        tmp_path / "sub" / "my.yml",
        "config: ../base.yaml\nmesh:\noptimizer: {learning_rate: 1e-4, betas: [0.8, 0.9]}\n"
        "training.microbatch_size: null\ndata:\n  text: ['a,b', c]\n",
    )
    config = configs.recipe(path)
    recipe = configs.recipe("gpt_tiny")
    training = dataclasses.replace(recipe.training, steps=70)
    assert (config.run_dir, config.model, config.training) == ("runs/my", recipe.model, training)
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert config.data.text == ("a,b", "c")
    write(tmp_path / "of_kind.yaml", "model: {kind: bert}\nrun_dir: elsewhere\n")
    config = configs.recipe(str(tmp_path / "of_kind.yaml"))
    assert (config.model.kind, config.run_dir) == ("bert", "elsewhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {step: 5}", "a.yaml: --training.step is unknown; did you mean --training.steps[?]"),
        ("trainer:\n  steps: 5", "a.yaml: --trainer.steps is unknown; did you mean --training.steps[?]"),
        ("training: {steps: many}", "a.yaml: training.steps='many' is not a whole number"),
        ("data: {tokenizer: [a, b]}", r"a.yaml: data.tokenizer=\['a', 'b'\] is not text"),
        ("training: {steps: 0}", "a.yaml: training.steps=0 must be"),
        ("training: {steps: 5}\ntraining: {seed: 1}", "a.yaml cannot be read: 'training' is given twice"),
        ("training: {steps: 5", "a.yaml cannot be read: "),
        ("just text", "a.yaml does not hold the sections of a config"),
        ("config: gpt_tny", "--config=gpt_tny is unknown; did you mean gpt_tiny[?]"),
        ("config: a.yaml", "a.yaml starts from itself"),
        ("config: b.yaml", "the file .*b.yaml does not exist"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        configs.recipe(write(tmp_path / "a.yaml", text))


def test_a_recipe_in_python(tmp_path):
    path = write(tmp_path / "own_recipes_of_a_test.py", OWN)
    assert configs.recipe(f"{path}:wide") == dataclasses.replace(configs.recipe("gpt_tiny"), run_dir="runs/wide")
    based = write(tmp_path / "a.yaml", "config: own_recipes_of_a_test.py:wide\ntraining: {steps: 7}")
    assert configs.recipe(based).training.steps == 7
    for name, message in (
        (f"{path}:wid", "own_recipes_of_a_test.py:wid is unknown; did you mean wide"),
        (path, "name one of its functions, .*own_recipes_of_a_test.py:NAME: number, wide"),
        (f"{path}:number", "number returns int, not a megajax.Config"),
        ("none.py:wide", "the file none.py does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            configs.recipe(name)


def test_a_recipe_that_hides_another_module_stays_out_of_the_path(tmp_path):
    path = list(sys.path)
    with pytest.raises(ValueError, match="there is another module dataclasses"):
        configs.recipe(write(tmp_path / "dataclasses.py", OWN) + ":wide")
    assert sys.path == path


def test_the_command_saves_what_it_would_train(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    train.main(["--config=gpt_tiny", "--training.steps=80", f"--save_config={path}"])
    assert "--config=" in capsys.readouterr().out
    saved = configs.recipe(str(path))
    recipe = configs.recipe("gpt_tiny")
    training = dataclasses.replace(recipe.training, steps=80)
    assert dataclasses.replace(saved, optimizer=recipe.optimizer) == dataclasses.replace(
        recipe, training=training, run_dir="runs/my"
    )
    with pytest.raises(ValueError, match="my.yaml exists"):
        train.main(["--config=gpt_tiny", f"--save_config={path}"])
    with pytest.raises(ValueError, match="must end in .yaml"):
        train.main(["--config=gpt_tiny", f"--save_config={tmp_path}/my.json"])


def test_epochs_are_saved_in_place_of_the_steps_that_they_will_be(tmp_path):
    config = Config()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=2.0), run_dir="r")
    recipe_files.write(config, str(tmp_path / "a.yaml"))
    assert configs.recipe(str(tmp_path / "a.yaml")) == config


def test_the_schema_refuses_what_the_file_may_not_say():
    validator = pytest.importorskip("jsonschema").Draft7Validator(recipe_files.schema())
    validator.validate({"config": "gpt_tiny", "mesh": {"fsdp": -1}, "data": {"paths": "a,b"}, "model": {"moe": {}}})
    for wrong in (
        {"training": {"step": 5}}, {"training": {"steps": 0}}, {"training": {"steps": "5"}}, {"trainer": {}},
        {"optimizer": {"betas": [0.9]}}, {"model": {"kind": "none"}}, {"optimizer": {"schedule": "round"}},
    ):  # fmt: skip
        assert not validator.is_valid(wrong), wrong
