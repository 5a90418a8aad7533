"""Nested blends from files: the shares they come to, and what is refused by file and entry."""

import json

import pytest

from megajax.data.blend_file import phase_weights, prefixes, read_blend, shares

TOKENS = {"a": 100, "b": 300, "c": 600}


def write(folder, **files):
    for name, blend in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"blend": blend}))


def parts(paths):
    found = shares(read_blend(paths), lambda path: TOKENS[path.rpartition("/")[2]])
    return {path.rpartition("/")[2]: pytest.approx(share) for path, share in found.items()}


def test_paths_count_by_weight_or_by_tokens():
    assert parts(["a", "b"]) == {"a": 0.25, "b": 0.75}
    assert parts(["3", "a", "1", "b"]) == {"a": 0.75, "b": 0.25}


def test_nested_weights_multiply_and_paths_are_relative_to_their_file(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", inner=[{"path": "b", "weight": 1}, {"path": "../c", "weight": 3}])
    write(tmp_path, outer=[{"path": "a", "weight": 1}, {"file": "sub/inner.json", "weight": 1}])
    outer = str(tmp_path / "outer.json")
    assert parts([outer]) == {"a": 0.5, "b": 0.125, "c": 0.375}
    assert prefixes(read_blend([outer])) == [f"{tmp_path}/a", f"{tmp_path}/sub/b", f"{tmp_path}/sub/../c"]


def test_epochs_say_how_often_one_is_read_while_another_is_read_once(tmp_path):
    write(tmp_path, blend=[{"path": "a", "epochs": 3}, {"blend": [{"path": "b"}, {"path": "c"}], "epochs": 0.5}])
    amounts = {"a": 300, "b": 150, "c": 300}
    assert parts([str(tmp_path / "blend.json")]) == {name: tokens / 750 for name, tokens in amounts.items()}


def test_a_dataset_named_twice_is_one_dataset_with_both_parts(tmp_path):
    write(tmp_path, blend=[{"path": "a", "weight": 1}, {"blend": [{"path": "a"}, {"path": "b"}], "weight": 1}])
    assert parts([str(tmp_path / "blend.json")]) == {"a": 0.625, "b": 0.375}


def test_phases_have_a_weight_for_every_dataset_of_the_run():
    names, weights = phase_weights([{"a": 0.5, "b": 0.5}, {"b": 0.1, "c": 0.9}])
    assert names == ["a", "b", "c"]
    assert weights == [[0.5, 0.5, 0.0], [0.0, 0.1, 0.9]]


@pytest.mark.parametrize(
    "blend, message",
    [
        ([], r"blend is not a list of entries"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], r"give each entry a \"weight\", or none"),
        ([{"weight": 1}], r"blend\[0\] must have one of"),
        ([{"path": "a", "blend": []}], r"blend\[0\] must have one of"),
        ([{"path": "a", "weight": 1, "epochs": 2}], r"blend\[0\] must have one of"),
        ([{"blend": [{"path": "a", "weight": 0}]}], r"blend\[0\].blend\[0\] has weight 0; use a number above 0"),
        ([{"path": "a", "epochs": True}], r"has epochs True"),
        ([{"path": "a", "weight": float("nan")}], r"has weight nan"),
        ([{"path": "a", "weight": 1e308}, {"path": "b", "weight": 1e308}], r"has weight 1e.308; .* at most 1e.30"),
        ([{"path": "x.json"}], r"blend\[0\] names 'x.json'"),
        ([{"file": "gone.json"}], r"gone.json cannot be read"),
        ([{"file": "blend.json"}], r"blend.json includes itself"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_entry(blend, message, tmp_path):
    write(tmp_path, blend=blend)
    with pytest.raises(ValueError, match=message) as error:
        read_blend([str(tmp_path / "blend.json")])
    assert "blend.json" in str(error.value) or "gone.json" in str(error.value)
