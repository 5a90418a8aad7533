"""The inspection command: its dump equals the oracle file, exactly."""

from pathlib import Path

import numpy as np
import pytest

from megajax.data.inspect import main

ORACLES = Path(__file__).parents[1] / "oracles"
RUN = ["--sequence_length=64", "--seed=1234", "--split=90,10,0", "--num_samples=100,4,0", "--pad_id=999"]


@pytest.mark.parametrize("names, weights, kind", [("a", [], "single"), ("ab", ["--weights", "0.7", "0.3"], "blend")])
def test_the_dump_equals_the_oracle(tmp_path, names, weights, kind):
    prefixes = [str(ORACLES / "data" / name) for name in names]
    main(["--prefix", *prefixes, *weights, *RUN, "--output", str(tmp_path / "x.npz")])
    oracle, got = np.load(ORACLES / "gpt_dataset.npz"), np.load(tmp_path / "x.npz")
    assert sorted(got.files) == sorted(key for key in oracle.files if key.startswith(kind))
    for key in got.files:
        assert got[key].dtype == oracle[key].dtype
        assert np.array_equal(got[key], oracle[key]), key


def test_statistics_name_documents_and_tokens(capsys):
    main(["--prefix", str(ORACLES / "data" / "c")])
    assert "documents 23, sequences 23, tokens 1,023 (uint16, 2,046 bytes)" in capsys.readouterr().out


def test_errors_are_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["--prefix", "nowhere/x"])
    error = capsys.readouterr().err
    assert error.startswith("error: indexed dataset: file nowhere/x.idx does not exist") and error.count("\n") == 1
