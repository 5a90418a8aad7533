"""The doctor says what a bug report needs, also on a machine where something is missing."""

import email
import re
import sys
import tomllib
from pathlib import Path

import pytest

import megajax
from megajax import cli
from megajax.cli import doctor

ROOT = Path(__file__).parents[2]


def test_the_first_line_has_versions_and_devices_and_the_rest_works(capsys):
    doctor.main([])
    first, *rows = capsys.readouterr().out.splitlines()
    assert re.match(r"megajax [\d.]+, Python 3[\d.]+, jax [\d.]+, jaxlib [\d.]+, 8 x cpu, \w+", first)
    named = {row[2:].split("  ")[0]: row for row in rows}
    assert list(named) == ["packages", *doctor.CHECKS]
    assert "flax 0." in named["packages"] and "TFLOP/s" in named["matmul"] and "test" in named["extras"]
    assert re.search(r"GiB free in /", named["disk"]) and re.search(r": [\d,]+ files?, ", named["compiled programs"])


def test_what_is_missing_is_said_and_the_rest_is_still_checked(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(doctor, "PACKAGES", ("flax", "no-such-package"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: 1 / 0)
    with pytest.raises(SystemExit) as end:
        doctor.main([])
    out = capsys.readouterr().out
    assert end.value.code == 1 and "no-such-package missing" in out
    assert re.search("disk +FAILED: ZeroDivisionError", out) and re.search("matmul +FAILED: ModuleNotFoundError", out)
    assert re.search("XLA_FLAGS +none|XLA_FLAGS +xla", out)


def test_extras_are_the_same_from_a_clone_and_from_an_installed_package(monkeypatch, tmp_path):
    from_clone = doctor.extras()
    assert from_clone["cuda13"] == ["jax-cuda13-plugin"] and {"matplotlib", "ipykernel"} <= set(from_clone["notebook"])
    text = ""
    for extra, lines in tomllib.loads(doctor.PYPROJECT.read_text())["project"]["optional-dependencies"].items():
        text += f"Provides-Extra: {extra}\n"
        text += "".join(f'Requires-Dist: {line}; extra == "{extra}"\n' for line in lines)
    monkeypatch.setattr(doctor, "PYPROJECT", tmp_path / "none")
    monkeypatch.setattr(doctor.importlib.metadata, "metadata", lambda _: email.message_from_string(text))
    assert doctor.extras() == from_clone


def test_there_is_one_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megajax", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"megajax {megajax.__version__}\n"
    assert f"\nversion: {megajax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megajax.__version__"}
