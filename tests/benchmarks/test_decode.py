"""The benchmark of serving records each phase, also if another one fails."""

import json

import pytest

from benchmarks import decode


def test_each_phase_is_recorded_and_a_failure_ends_only_its_own(tmp_path, monkeypatch, capsys):
    class Device:
        device_kind = "test"

    class FakeEngine:
        class mesh:
            size = 1

            class devices:
                flat = [Device]

    def fails(engine, options):
        yield {"first": 1}
        raise RuntimeError("out of memory")

    monkeypatch.setattr(
        decode, "make_engine", lambda config, options: (FakeEngine, {"ready_seconds": options.serving.max_rows})
    )
    monkeypatch.setattr(decode, "use_compilation_cache", lambda: None)
    monkeypatch.setitem(decode.PHASES, "decode", fails)
    monkeypatch.setitem(decode.PHASES, "mix", lambda engine, options: iter([{"requests": options.requests}]))
    output = tmp_path / "decode.jsonl"
    arguments = ["--config=gpt_tiny", "--phases=decode,mix", f"--output={output}", "--serving.max_rows=7"]
    assert decode.main(arguments) == 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["about", "ready", "decode", "decode", "mix"]
    assert lines[1]["ready_seconds"] == 7 and lines[2]["first"] == 1 and lines[4]["requests"] == 256
    assert "out of memory" in lines[3]["error"]
    assert output.read_text() in capsys.readouterr().out
    decode.main([*arguments, "--seconds=0"])
    assert all("skipped" in json.loads(line) for line in output.read_text().splitlines()[1:])


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="--phases=decoding is unknown; use any of torch,vllm,ready,decode"):
        decode.main(["--phases=decoding"])
