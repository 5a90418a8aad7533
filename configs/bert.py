"""BERT: bidirectional encoders that learn from masked tokens."""

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.models.bert import BertConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.masked import Masked
from megajax.training.config import TrainingConfig


def bert_tiny() -> Config:
    """A BERT of 0.7 M parameters on the bytes of Python's standard library: minutes on a laptop.

    Hardware: 2 CPU cores. Every mesh axis may be 2. Megatron-LM's variant, with norms before attention and MLP.
    Measured: after 400 steps 43.4 % of the masked bytes of held-out files are right (eval_loss 2.14); always the most
    frequent byte, a space, is right for 23.6 %, and the frequencies of bytes have a loss of 3.30. The order of the two
    texts is not learnt in that time. 5.3 CPU minutes (jax 0.10.2, 2026-11-23).
    Command: python train.py --config=bert_tiny
    """
    return Config(
        model=BertConfig(
            num_layers=3,
            embed_dim=128,
            num_heads=2,
            vocab_size=261,
            max_positions=64,
            norm_placement="pre",
            embedding_norm=False,
            norm_epsilon=1e-5,
            dropout=0.0,
            attention_dropout=0.0,
            init_std=0.05,
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        task=Masked(sentences="sop"),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="bytes"),
        optimizer=OptimizerConfig(
            name="muon",
            momentum=0.95,
            learning_rate=1.5e-2,
            min_learning_rate=1e-4,
            warmup_steps=20,
            weight_decay=0.1,
            groups=("*embedding learning_rate_scale=0.1",),
        ),
        training=TrainingConfig(
            steps=400,
            global_batch_size=64,
            sequence_length=64,
            log_every_steps=10,
            eval_every_steps=50,
            eval_steps=8,
        ),
        checkpoint=CheckpointConfig(every_steps=100),
    )


def bert_base() -> Config:
    """BERT base (Devlin et al. 2018), 110 M parameters: 256 texts of 512 tokens, 1 M steps.

    Hardware: one GPU. Data: mock documents until you name yours; the paper's next-sentence task needs sentences
    (--task.sentences=nsp --model.next_sentence=True, docs/bert.md). Without attention dropout, which needs the plain
    attention.
    Command: python train.py --config=bert_base --data.paths=PREFIX
    """
    return _bert(BertConfig(next_sentence=False, attention_dropout=0.0), learning_rate=1e-4)


def bert_large() -> Config:
    """BERT large (Devlin et al. 2018), 335 M parameters: 24 layers of width 1024, 256 texts of 512 tokens, 1 M steps.

    Hardware: one GPU, 8 with --mesh.data=8. Data as for bert_base.
    Measured on one H100: 718 ms per step, 182,400 tokens/s (2026-11-23, commit 7912b37; docs/bert.md).
    Command: python train.py --config=bert_large --data.paths=PREFIX
    """
    model = BertConfig(num_layers=24, embed_dim=1024, num_heads=16, next_sentence=False, attention_dropout=0.0)
    return _bert(model, learning_rate=5e-5)


def _bert(model: BertConfig, learning_rate: float) -> Config:
    return Config(
        model=model,
        mesh=MeshConfig(data=-1),
        task=Masked(),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate, min_learning_rate=0.0, schedule="linear", warmup_steps=10_000,
            weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-6,
        ),
        training=TrainingConfig(steps=1_000_000, global_batch_size=256, microbatch_size=32, sequence_length=512),
    )  # fmt: skip
