"""The benchmark of servers writes a folder that the server reads, and measures every load."""

import json

import pytest

from benchmarks import servers

TINY = [
    "--model.num_layers=1", "--model.embed_dim=64", "--model.num_heads=4", "--model.num_kv_heads=2",
    "--model.mlp_dim=128", "--model.vocab_size=512",
]  # fmt: skip


@pytest.mark.slow
def test_every_load_is_measured(tmp_path, capfd):
    pytest.importorskip("transformers")
    output = tmp_path / "servers.jsonl"
    sizes = ["--scale=0.03", "--prompt_tokens=16", "--max_tokens=8"]
    servers.main(["--config=llama3_8b", *TINY, *sizes, f"--output={output}", f"--folder={tmp_path / 'model'}"])
    ready, *measured = (json.loads(line) for line in output.read_text().splitlines())
    assert ready["server"] == "megajax" and ready["ready_seconds"] > 0
    assert len(measured) == servers.ROUNDS * len(servers.LOADS)
    for line in measured:
        assert line["num_finished"] == line["num_requests"]
        assert line["generated_tokens_per_second"] > 0
    assert "vllm is not installed" in capfd.readouterr().err
