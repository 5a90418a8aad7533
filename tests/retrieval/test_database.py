"""Databases as functions of new text, the commands, and vectors of a model."""

import numpy as np
import pytest

from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.indexed.blocks import BlockFile
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.indexed.neighbours import NeighbourTable
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.inference.load import open_model
from megajax.inference.text_encoder import TextEncoder
from megajax.mesh.config import MeshConfig
from megajax.models.bert import BertConfig
from megajax.precision import PrecisionConfig
from megajax.retrieval import __main__ as commands
from megajax.retrieval.build import build
from megajax.retrieval.database import Database
from megajax.retrieval.inputs import NO_TOKEN, NeighbourInputs
from megajax.tasks.masked import Masked
from megajax.training.config import TrainingConfig

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine, they say",
    "all that glitters is not gold, nor silver",
    "rolling stones gather no moss at all",
]
INPUTS = NeighbourInputs(chunk_length=16, count=2, length=32)


@pytest.fixture
def prefix(tmp_path) -> str:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    prefix = str(tmp_path / "proverbs")
    preprocess([str(tmp_path / f"{i}.txt") for i in range(4)], prefix, BytesTokenizer(), "bytes", num_workers=0)
    return prefix


def tokens(text: str) -> np.ndarray:
    return np.array(BytesTokenizer().encode(text), np.int32)


def test_a_database_gives_the_nearest_chunks_and_what_follows_them(prefix):
    build(prefix, split=(3, 1, 0), chunk_length=16)
    database = Database.open(prefix, INPUTS)
    found = database.neighbours_of([tokens("the quick fox"), tokens("glitters"), tokens("moss at all")])
    assert found.dtype == np.int32 and found.shape == (3, 2, 32)
    text = [BytesTokenizer().decode(row[0][row[0] != NO_TOKEN].tolist()) for row in found]
    assert text[:2] == [TEXTS[0][:32], TEXTS[2][:32]]
    assert "moss" not in text[2]  # it is not in the training documents
    [own] = database.neighbours_of([database.grid.tokens(np.array(2), 16)])
    assert own[0].tolist() == [*tokens(TEXTS[0][32:]), BytesTokenizer().eod_id, *[NO_TOKEN] * 20]
    scores, chunks = database.nearest([tokens("gold")], 12)
    assert (chunks[0] >= 0).sum() == len(scores[0][np.isfinite(scores[0])]) == 9
    with pytest.raises(ValueError, match="chunks of 16 tokens, the model reads chunks of 64; .*--chunk_length=64"):
        Database.open(prefix)


def test_the_commands_build_and_query(prefix, capsys):
    commands.main(["build", prefix + ".bin", "--split=3,1,0", "--chunk_length=16"])
    assert "documents 0 to 3 of" in capsys.readouterr().out
    assert NeighbourTable(prefix).documents == (0, 3)
    commands.main(["query", prefix, "--text=is not gold", "--count=2"])
    first, second = capsys.readouterr().out.splitlines()
    assert "document 2, chunk" in first and "is not gold" in first
    assert float(first.split()[0]) > float(second.split()[0])


@pytest.mark.parametrize("arguments, words", [
    (["query", "{0}", "--text=x"], "proverbs.neighbours does not exist; build it again with megajax retrieve build"),
    (["build", "{0}", "--split=0,1,0"], "leaves no text of"),
    (["build", "{0}x"], "proverbsx.idx does not exist"),
    (["find"], "name a command"),
])  # fmt: skip
def test_wrong_commands_end_with_one_line(arguments, words, prefix, capsys):
    with pytest.raises(SystemExit) as exit:
        commands.main([argument.format(prefix) for argument in arguments])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and words in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    """A run of one step, which reads up to 16 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text * 10)
    config = Config(
        model=BertConfig(
            num_layers=1, embed_dim=32, num_heads=2, mlp_dim=32, vocab_size=300, max_positions=16, next_sentence=False
        ),
        task=Masked(),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig("text", text=(f"{folder}/*.txt",), tokenizer="bytes", cache_dir=str(folder / "cache")),
        training=TrainingConfig(steps=1, global_batch_size=8, sequence_length=16, eval_every_steps=0),
        checkpoint=CheckpointConfig(every_steps=1),
        run_dir=str(folder / "run"),
    )  # fmt: skip
    assert run.train(config) == "finished"
    return config.run_dir


def test_a_bert_embeds_the_text_of_chunks(bert, prefix):
    commands.main(["build", prefix, "--split=3,1,0", "--chunk_length=8", f"--embed={bert}"])
    database = Database.open(prefix, NeighbourInputs(chunk_length=8, count=1, length=16))
    want = TextEncoder(open_model(bert)).embed([TEXTS[1][8:16]], "mean")[0]
    chunk = int(database.grid.first[1]) + 1
    found = BlockFile(prefix + ".embeddings").array(chunk, chunk + 1)[0]
    np.testing.assert_allclose(found, want / np.linalg.norm(want), atol=1e-3)  # float16
    assert database.neighbours_of([tokens(TEXTS[1][8:16])])[0, 0].tolist() == tokens(TEXTS[1][8:24]).tolist()


def test_a_model_reads_as_much_of_a_chunk_as_it_can(bert, prefix):
    commands.main(["build", prefix, "--split=3,1,0", "--chunk_length=24", f"--embed={bert}"])
    want = TextEncoder(open_model(bert)).embed([TEXTS[0][:12]], "mean")[0]
    found = BlockFile(prefix + ".embeddings").array(0, 1)[0]
    np.testing.assert_allclose(found, want / np.linalg.norm(want), atol=1e-3)


def test_a_model_needs_the_tokenizer_of_the_data(bert, tmp_path, capsys):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([np.arange(20)])
    with pytest.raises(SystemExit):
        commands.main(["build", str(tmp_path / "x"), f"--embed={bert}"])
    assert "x.meta.json does not say how to decode the tokens" in capsys.readouterr().err
