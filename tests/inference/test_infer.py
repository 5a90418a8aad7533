"""The command line of infer.py: what is wrong is said in one line, before a model is loaded."""

import pytest

from megajax.cli import infer


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "arguments are required"),
        ("serve --run=x --port=80", "not implemented yet"),
        ("generate --run=x", "--prompt"),
        ("generate --prompt=x", "--run"),
        ("generate --run=x --prompt=x --promt=y", "--promt=y is unknown; did you mean --prompt"),
        ("generate --run=x --prompt=x --mesh.tp=2", "did you mean --mesh.tensor"),
        ("generate --run=x --prompt=x --top_k=many", "invalid int value"),
        ("generate --run=x --prompt=x --temperature=-1", "temperature=-1"),
        ("generate --run=nowhere --prompt=x", "run=nowhere"),
        ("chat --run=nowhere --max_tokens=0", "max_tokens=0"),
        ("bench --run=nowhere --batch=1,b", "'1,b' is not a list"),
        ("bench --run=nowhere --batch=0", "batch=0"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        infer.main(arguments.split())
    assert "\n" not in str(error.value)


def test_every_axis_of_the_mesh_can_be_set():
    from megajax.mesh import AXES

    for axis in AXES:
        options = infer._parse(["bench", "--run=x", f"--mesh.{axis}=3"])
        assert getattr(options, f"mesh.{axis}") == 3
