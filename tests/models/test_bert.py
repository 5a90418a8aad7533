"""BERT equals Megatron Core's (tests/oracles), is the same on every mesh, trains, resumes and is evaluated."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.cli import infer, serving
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.inference.load import open_model
from megajax.inference.text_encoder import TextEncoder
from megajax.layers.attention import multi_head as attention_layer
from megajax.mesh.config import MeshConfig
from megajax.models.bert import BertConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.overrides import override
from megajax.parallel.context import sequence_order
from megajax.precision import PrecisionConfig
from megajax.tasks.masked import Masked
from megajax.training.config import LaunchConfig, TrainingConfig
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.megatron import from_megajax, to_megajax
from runs import run_of

ORACLES = Path(__file__).parent.parent / "oracles"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
FLOAT32 = PrecisionConfig(compute="float32")


# ----------------------------------------------------------------------------- Megatron Core


class Oracle:
    def __init__(self):
        saved = np.load(ORACLES / "bert.npz")
        sizes = json.loads(str(saved["config"]))
        self.config = BertConfig(
            num_layers=sizes["num_layers"], embed_dim=sizes["hidden_size"], num_heads=sizes["num_attention_heads"],
            vocab_size=sizes["vocab"], max_positions=sizes["seq"], vocab_multiple=32, norm_epsilon=1e-5,
            norm_placement="pre", embedding_norm=False, tied_embeddings=False, dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        self.named = {key[6:]: saved[key] for key in saved.files if key.startswith("param/")}
        self.params = to_megajax(self.named, self.config)
        self.gradients = {key[5:]: saved[key] for key in saved.files if key.startswith("grad/")}
        self.logits, self.pair_logits, self.loss = saved["logits"], saved["binary_logits"], float(saved["loss_mean"])
        ids = saved["ids"].astype(np.int32)
        self.is_text = saved["attention_mask"].astype(bool)
        self.batch = {
            "tokens": ids,
            "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape),
            "segment_ids": self.is_text.astype(np.int32),
            "token_types": np.zeros_like(ids),
        }


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def heads(model, params, batch):
    """-> (logits of every token, logits of the next-sentence head)."""
    module = model.module(params)
    h, _ = module.hidden(batch)
    return module.token_logits(h), module.pair_logits(h, batch)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "fsdp": 2, "context": 2}], ids=str)
def test_logits_equal_megatrons(oracle, sizes, make_test_mesh):
    """Of the text: padding attends to padding here, and to nothing in Megatron."""
    model = Model(oracle.config, FLOAT32)
    mesh = make_test_mesh(**sizes)
    params = jax.device_put(oracle.params, model.shardings(mesh))
    order = sequence_order(oracle.is_text.shape[1], sizes.get("context", 1), "ring")
    batch = {name: array[:, order] for name, array in oracle.batch.items()}
    with jax.set_mesh(mesh):
        logits, pair_logits = jax.jit(lambda params, batch: heads(model, params, batch))(params, batch)
    found = np.asarray(logits)[:, np.argsort(order)]
    np.testing.assert_allclose(found[oracle.is_text], oracle.logits[oracle.is_text], atol=TOLERANCE)
    np.testing.assert_allclose(pair_logits, oracle.pair_logits, atol=TOLERANCE)


def test_every_gradient_equals_megatrons(oracle, monkeypatch):
    """Of the mean square of all logits, those of the padding included: here the padding sees no key, as in Megatron,
    which gives it the mean of all values."""

    def megatrons(q, k, v, *, segments, **options):
        queries, keys = segments
        return actual(q, k, v, segments=(queries, jnp.where(keys == 0, -1, keys)), **options)

    actual = attention_layer.attention
    monkeypatch.setattr(attention_layer, "attention", megatrons)
    model = Model(oracle.config, FLOAT32)

    def objective(params):
        logits, _ = heads(model, params, oracle.batch)
        return jnp.mean(logits**2), logits

    (loss, logits), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(oracle.params)
    assert loss == pytest.approx(oracle.loss, rel=TOLERANCE)
    np.testing.assert_allclose(logits, oracle.logits, atol=TOLERANCE)
    found = from_megajax(gradients, oracle.config)
    without = {name for name in found if name.startswith(("pooler.", "binary_head."))}
    assert set(found) - without == set(oracle.gradients) and not any(np.any(found[name]) for name in without)
    for name, wanted in oracle.gradients.items():
        # That of the bias of keys is zero but for rounding, so it is compared with that of all three.
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=name)


def test_megatrons_parameters_survive_the_way_through_ours(oracle):
    again = from_megajax(oracle.params, oracle.config)
    jax.tree.map(np.testing.assert_array_equal, again, oracle.named)


@pytest.mark.parametrize("name, count", [("bert_base", 109_514_298), ("bert_large", 335_174_458)])
def test_published_sizes(name, count):
    """Those of BertForMaskedLM in transformers, without padding."""
    model = Model(dataclasses.replace(configs.recipe(name).model, vocab_multiple=2))
    assert model.num_parameters() == model.num_active_parameters() == count


# ----------------------------------------------------------------------------- training

SMALL = BertConfig(
    num_layers=2, embed_dim=16, num_heads=4, vocab_size=264, vocab_multiple=8, max_positions=16, dropout=0.1,
    attention_dropout=0.1, init_std=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Prefix of documents of sentences of bytes."""
    prefix = str(tmp_path_factory.mktemp("data") / "text")
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_document(rng.integers(97, 107, rng.integers(2, 6)).astype(np.uint16) for _ in range(6))
    return prefix


def config_of(sentences: str, run_dir: Path, mesh=MeshConfig(), **training) -> Config:
    return Config(
        model=SMALL,
        mesh=mesh,
        precision=FLOAT32,
        task=Masked(sentences="sop"),
        data=DataConfig(
            source="indexed", paths=(sentences,), tokenizer="bytes", split=(8, 2, 0),
            cache_dir=str(run_dir.parent / "cache"),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(**dict(
            steps=4, global_batch_size=8, sequence_length=16, log_every_steps=1, eval_every_steps=2, eval_steps=1,
        ) | training),
        checkpoint=CheckpointConfig(every_steps=2),
        run_dir=str(run_dir),
    )  # fmt: skip


NAMES = ("loss", "next_sentence_loss", "eval_loss", "eval_accuracy", "eval_next_sentence_accuracy")


def numbers(lines: list[dict]) -> list[float]:
    return [line[name] for line in lines for name in NAMES if name in line]


@pytest.fixture(scope="module")
def trained(sentences, tmp_path_factory):
    """(config, lines of metrics) of a run on one device."""
    config = config_of(sentences, tmp_path_factory.mktemp("runs") / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return config, run_of(config, monkeypatch)


def test_it_trains_and_is_evaluated(trained):
    _, lines = trained
    assert [line["step"] for line in lines if "eval_accuracy" in line] == [2, 4]
    assert all(0 <= line["eval_accuracy"] <= 1 for line in lines if "eval_accuracy" in line)
    assert all("next_sentence_loss" in line for line in lines if "loss" in line)
    assert len(numbers(lines)) == 4 * 2 + 2 * 3


@pytest.mark.parametrize("mesh", [
    pytest.param(dict(pipeline=2, context=2, fsdp=2), marks=pytest.mark.slow),
    pytest.param(dict(fsdp=2, tensor=2, context=2), marks=pytest.mark.slow),
    pytest.param(dict(data=2, pipeline=2, tensor=2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_every_mesh_trains_the_same(mesh, trained, sentences, tmp_path, monkeypatch):
    mesh = MeshConfig(**mesh)
    microbatches = dict(microbatch_size=4) if mesh.pipeline > 1 else {}
    lines = run_of(config_of(sentences, tmp_path / "run", mesh, **microbatches), monkeypatch)
    np.testing.assert_allclose(numbers(lines), numbers(trained[1]), rtol=2e-5)


@pytest.mark.slow
def test_layers_are_the_same_scanned_and_recomputed(trained, sentences, tmp_path, monkeypatch):
    how = ["--execution.scan_layers=True", "--execution.recompute=full"]
    lines = run_of(override(config_of(sentences, tmp_path / "run"), how), monkeypatch)
    np.testing.assert_allclose(numbers(lines), numbers(trained[1]), rtol=1e-5)


@pytest.mark.slow
def test_it_resumes_bit_for_bit(trained, sentences, tmp_path, monkeypatch):
    config = config_of(sentences, tmp_path / "run")
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert numbers(run_of(config, monkeypatch)) == numbers(trained[1])


@pytest.mark.parametrize("argument, words", [
    ("--task.sentences=none", "has sentence_order .*use --task.sentences=sop"),
    ("--task.kind=language", "task.kind=language learns from the head next_token.*use --task.kind=masked"),
    ("--model.next_sentence=False", "use --task.sentences=none"),
    ("--model.head=token_classification", "use --task.kind=classification"),
    ("--model.head=none", "has none, so it cannot be trained"),
    ("--training.sample_prompt=x", "infer.py fill"),
    ("--training.sequence_length=32", "model.max_positions=16"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(argument, words, sentences, tmp_path):
    config = override(config_of(sentences, tmp_path / "run"), [argument])
    with pytest.raises(ValueError, match=words):
        config.check()


# ----------------------------------------------------------------------------- inference


def lines_of(capsys, arguments: list[str]) -> list[dict]:
    capsys.readouterr()
    infer.main(arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_masks_are_filled_and_texts_embedded(trained, capsys):
    run_dir = trained[0].run_dir
    texts = ["--text=ab[MASK]d", "--text=[MASK] abc [MASK]"]
    first, second = lines_of(capsys, ["fill", f"--run={run_dir}", "--top_k=3", *texts])
    assert [len(first["masks"]), len(second["masks"])] == [1, 2]
    opened = open_model(run_dir)
    encoder = TextEncoder(opened)
    weights = opened.restore()
    special = encoder.special
    tokens = np.array([[special.cls_id, 97, 98, special.mask_id, 100, special.sep_id]], np.int32)
    batch = {
        "tokens": tokens, "positions": np.arange(6, dtype=np.int32)[None], "segment_ids": np.ones_like(tokens),
        "token_types": np.zeros_like(tokens),
    }  # fmt: skip

    @jax.jit
    def outputs(params, batch):
        module = encoder.model.module(params)
        h, _ = module.hidden(batch)
        return h, module.token_logits(h)

    _, logits = outputs(weights, batch)
    wanted = np.sort(np.asarray(jax.nn.softmax(logits[0, 3])))[::-1][:3]
    np.testing.assert_allclose([found["probability"] for found in first["masks"][0]], wanted, rtol=1e-5)

    np.testing.assert_allclose(encoder.embed(["ab[MASK]"], "cls").shape, (1, 16))
    tokens[0, 3] = ord("c")
    (record,) = lines_of(capsys, ["embed", f"--run={run_dir}", "--text=abcd", "--pooling=mean"])
    h, _ = outputs(weights, batch)
    np.testing.assert_allclose(record["embedding"], np.mean(h[0], axis=0), atol=1e-5)


@pytest.mark.parametrize("arguments", [["generate", "--prompt=a"], ["chat"], ["bench"]], ids=lambda a: a[0])
def test_generation_is_refused_by_name(arguments, trained):
    with pytest.raises(ValueError, match="model.kind=bert .*infer.py fill"):
        infer.main([arguments[0], f"--run={trained[0].run_dir}", *arguments[1:]])


def test_a_server_embeds(trained, monkeypatch):
    made = []
    monkeypatch.setattr(serving, "serve", lambda make, config, bound: made.append(make(None)))
    infer.main(["serve", f"--run={trained[0].run_dir}", "--port=0", "--pooling=cls"])
    assert "/v1/embeddings" in [route.path for route in made[0].routes]
    for option in ("--max_rows=4", "--draft_run=x", "--allow_load"):
        with pytest.raises(ValueError, match="is of a server that generates"):
            infer.main(["serve", f"--run={trained[0].run_dir}", "--port=0", option])


def test_a_refusal_names_what_the_head_can_do():
    with pytest.raises(ValueError, match="use infer.py classify or infer.py embed$"):
        BertConfig(head="token_classification").check_generates()


# ----------------------------------------------------------------------------- fine-tuning


def fine_tune(
    trained, tmp_path, monkeypatch, head: str, records: list[dict], num_classes: int, steps: int
) -> tuple[Config, list]:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = override(trained[0], [
        f"--model.head={head}", f"--model.num_classes={num_classes}", "--data.source=text", "--data.tokenizer=bytes",
        f"--data.text={tmp_path / 'texts.jsonl'}", "--task.kind=classification", "--data.split=8,2,0",
        f"--checkpoint.start_from={trained[0].run_dir}",
        "--checkpoint.start_fresh=classifier*,head_*,pooler*,next_sentence*", f"--run_dir={tmp_path / 'run'}",
        f"--training.steps={steps}", f"--training.eval_every_steps={steps}", f"--training.log_every_steps={steps}",
        f"--checkpoint.every_steps={steps}", "--model.dropout=0", "--model.attention_dropout=0",
    ])  # fmt: skip
    return config, run_of(config, monkeypatch)


def test_texts_are_classified_and_exported(trained, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(1)
    letters = {"early": "abc", "late": "xyz", "middle": "mno"}
    records = [
        {"text": "".join(rng.choice(list(letters[label]), 6)), "label": label}
        for label in rng.choice(list(letters), 200).tolist()
    ]
    config, lines = fine_tune(trained, tmp_path, monkeypatch, "sequence_classification", records, 3, steps=30)
    assert lines[-1]["eval_accuracy"] > 0.9, lines[-1]
    found = lines_of(capsys, ["classify", f"--run={config.run_dir}", "--text=abcabc", "--text=zzyx"])
    assert [record["label"] for record in found] == ["early", "late"]
    export = export_run(config.run_dir, tmp_path / "out")
    assert export.family.architecture == "BertForSequenceClassification"
    assert export.options["id2label"] == {0: "early", 1: "late", 2: "middle"}
    assert Folder(tmp_path / "out").model.num_classes == 3
    with pytest.raises(ValueError, match="model.num_classes=2.*use --model.num_classes=3"):
        run.load_data(override(config, ["--model.num_classes=2", f"--run_dir={tmp_path / 'other'}"]))


@pytest.mark.slow
def test_words_are_classified(trained, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(1)
    records = []
    for _ in range(200):
        words = ["".join(rng.choice(list(rng.choice(["abc", "xyz"])), 2)) for _ in range(3)]
        records.append({"words": words, "labels": [int(word[0] > "m") for word in words]})
    config, lines = fine_tune(trained, tmp_path, monkeypatch, "token_classification", records, 2, steps=200)
    assert lines[-1]["eval_accuracy"] > 0.9, lines[-1]
    (record,) = lines_of(capsys, ["classify", f"--run={config.run_dir}", "--text=ab xx ca"])
    assert record["labels"] == ["0", "1", "0"]
