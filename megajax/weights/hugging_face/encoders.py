"""Tables of the options and tensors of BERT and RoBERTa, used by mapping.py in both directions.

Sources: the configuration and modeling files of transformers 5. A RoBERTa counts positions from pad_token_id + 1, so
its table has more rows than a text has tokens, and it classifies texts with a layer of its own instead of a pooler.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.models.bert import BertConfig
from megajax.weights.hugging_face.form import Family, Form
from megajax.weights.hugging_face.options import Choice, Option, Options
from megajax.weights.tensor_map import Row, linear, norm


class BertForm(Form[BertConfig]):
    """BERT and RoBERTa with any head."""

    def with_sizes(self, config: BertConfig) -> BertConfig:
        return dataclasses.replace(config, mlp_dim=config.width_of_mlp)

    def without_training(self, config: BertConfig) -> BertConfig:
        return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)

    def canonical(self, config: BertConfig) -> BertConfig:
        default = self.default
        config = self.without_training(self.with_sizes(config))
        is_masked_lm = config.head == "masked_lm"
        return dataclasses.replace(
            config,
            vocab_multiple=default.vocab_multiple,
            init_std=default.init_std,
            tied_embeddings=config.tied_embeddings if is_masked_lm else default.tied_embeddings,
            next_sentence=config.next_sentence if is_masked_lm else default.next_sentence,
            head_activation=(config.head_activation or config.activation) if is_masked_lm else None,
            num_classes=config.num_classes if config.classifies else default.num_classes,
        )

    def sizes(self, config: BertConfig) -> dict[str, int]:
        return {"vocab": config.vocab_size, "positions": config.position_rows}

    def copied(self, config: BertConfig, name: str) -> str | None:
        if config.head != "masked_lm" or not config.tied_embeddings:
            return None
        if not name.startswith(("cls.predictions.decoder.", "lm_head.decoder.")):
            return None
        return {"weight": "embedding", "bias": "head_bias"}[name.rpartition(".")[2]]


class RobertaPositions:
    """max_position_embeddings counts the rows before the first position too: those up to pad_token_id."""

    keys = ("pad_token_id", "max_position_embeddings")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        pad = theirs.get("pad_token_id")
        offset = (1 if pad is None else pad) + 1
        return {"position_offset": offset, "max_positions": theirs.get("max_position_embeddings", 512) - offset}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        offset = ours["position_offset"]
        if offset < 1:
            raise ValueError(f"model.position_offset={offset}")
        return {"pad_token_id": offset - 1, "max_position_embeddings": ours["max_positions"] + offset}


class NumClasses:
    """The length of id2label, which transformers makes of num_labels if it is not there."""

    keys = ("id2label", "num_labels")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        number = len(theirs["id2label"]) if "id2label" in theirs else theirs.get("num_labels", 2)
        if number < 2:
            raise ValueError(f"num_labels={number}: regression is not supported, only classes")
        return {"num_classes": number}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        names = {number: f"LABEL_{number}" for number in range(ours["num_classes"])}
        return {"id2label": names, "label2id": {name: number for number, name in names.items()}}


# ----------------------------------------------------------------------------- options

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_COMMON: Options = (
    Option("vocab_size", "vocab_size"),
    Option("hidden_size", "embed_dim", 768),
    Option("num_hidden_layers", "num_layers", 12),
    Option("num_attention_heads", "num_heads", 12),
    Option("intermediate_size", "mlp_dim", 3072),
    Option("hidden_act", "activation", "gelu", values=_ACTIVATIONS),
    Option("hidden_dropout_prob", "dropout", 0.1),
    Option("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Option("type_vocab_size", "num_token_types", 2),
    Option("initializer_range", "init_std", 0.02),
    Option("layer_norm_eps", "norm_epsilon", 1e-12),
    Choice("position_embedding_type", "absolute"),
    Choice("is_decoder", False),
    Choice("add_cross_attention", False),
)
_TIED = Option("tie_word_embeddings", "tied_embeddings", True)
_BERT: Options = (*_COMMON, Option("max_position_embeddings", "max_positions", 512))
_ROBERTA: Options = (*_COMMON, RobertaPositions())
_ENCODER = dict(norm_placement="post_residual", embedding_norm=True)
_IS_BERT = _ENCODER | dict(position_offset=0)

# ----------------------------------------------------------------------------- tensors

_L = "layers.*."


def _encoder(prefix: str) -> tuple[Row, ...]:
    embeddings = f"{prefix}embeddings."
    layer = prefix + "encoder.layer.{}."
    return (
        Row(embeddings + "word_embeddings.weight", ("embedding",)),
        Row(embeddings + "position_embeddings.weight", ("position_embedding",)),
        Row(embeddings + "token_type_embeddings.weight", ("token_type_embedding",)),
        *norm(embeddings + "LayerNorm", "embedding_norm"),
        *linear(layer + "attention.self.query", _L + "attention.query"),
        *linear(layer + "attention.self.key", _L + "attention.key"),
        *linear(layer + "attention.self.value", _L + "attention.value"),
        *linear(layer + "attention.output.dense", _L + "attention.out"),
        *norm(layer + "attention.output.LayerNorm", _L + "attention_post_norm"),
        *linear(layer + "intermediate.dense", _L + "mlp.up"),
        *linear(layer + "output.dense", _L + "mlp.down"),
        *norm(layer + "output.LayerNorm", _L + "mlp_post_norm"),
    )


def _output(prefix: str) -> tuple[Row, ...]:
    """Of an untied output layer transformers uses the bias beside the matrix, and keeps another."""
    return (
        Row(f"{prefix}.bias", ("head_bias",)),
        Row(f"{prefix}.decoder.bias", ("head_bias",), where={"tied_embeddings": False}),
        Row(f"{prefix}.decoder.weight", ("head",), "linear"),
    )


# In a folder of the bare encoder names have no prefix.
_BARE_ENCODER = (*_encoder(""), *linear("pooler.dense", "pooler"))
_BERT_ENCODER = _encoder("bert.")
_BERT_POOLER = linear("bert.pooler.dense", "pooler")
_BERT_MASKED = (
    *linear("cls.predictions.transform.dense", "head_dense"),
    *norm("cls.predictions.transform.LayerNorm", "head_norm"),
    *_output("cls.predictions"),
)
_ROBERTA_ENCODER = _encoder("roberta.")
_ROBERTA_MASKED = (
    *linear("lm_head.dense", "head_dense"),
    *norm("lm_head.layer_norm", "head_norm"),
    *_output("lm_head"),
)
_CLASSIFIER = linear("classifier", "classifier")
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")
_PAIRS = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")


def _old_names(table: tuple[Row, ...]) -> tuple[Row, ...]:
    """As the first releases of BERT were converted: gamma and beta of the norms."""

    def renamed(row: Row) -> Row:
        theirs = row.theirs.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return dataclasses.replace(row, theirs=theirs)

    return tuple(map(renamed, table))


def _family(
    architecture: str, always: dict[str, Any], options: Options, weights: tuple[Row, ...], ignored: tuple[str, ...] = ()
) -> Family:
    model_type = "roberta" if architecture.startswith("Roberta") else "bert"
    return Family(architecture, model_type, always, options, weights, (_old_names(weights),), _FORM, ignored)


_FORM = BertForm(BertConfig())
_MASKED = dict(head="masked_lm", next_sentence=False)
_TEXTS = dict(head="sequence_classification")
_TOKENS = dict(head="token_classification")
_STATES = dict(head="none")

FAMILIES: tuple[Family, ...] = (
    _family(
        "BertForPreTraining",
        _IS_BERT | dict(head="masked_lm", next_sentence=True),
        (*_BERT, _TIED),
        (*_BERT_ENCODER, *_BERT_POOLER, *_BERT_MASKED, *linear("cls.seq_relationship", "next_sentence")),
    ),
    _family(
        "BertForMaskedLM",
        _IS_BERT | _MASKED,
        (*_BERT, _TIED),
        (*_BERT_ENCODER, *_BERT_MASKED),
        (*_POOLER, *_PAIRS),
    ),
    _family(
        "BertForSequenceClassification",
        _IS_BERT | _TEXTS,
        (*_BERT, NumClasses()),
        (*_BERT_ENCODER, *_BERT_POOLER, *_CLASSIFIER),
    ),
    _family(
        "BertForTokenClassification",
        _IS_BERT | _TOKENS,
        (*_BERT, NumClasses()),
        (*_BERT_ENCODER, *_CLASSIFIER),
        _POOLER,
    ),
    _family("BertModel", _IS_BERT | _STATES, _BERT, _BARE_ENCODER),
    _family(
        "RobertaForMaskedLM",
        _ENCODER | _MASKED,
        (*_ROBERTA, _TIED),
        (*_ROBERTA_ENCODER, *_ROBERTA_MASKED),
        _POOLER,
    ),
    _family(
        "RobertaForSequenceClassification",
        _ENCODER | _TEXTS,
        (*_ROBERTA, NumClasses()),
        (*_ROBERTA_ENCODER, *linear("classifier.dense", "pooler"), *linear("classifier.out_proj", "classifier")),
        _POOLER,
    ),
    _family(
        "RobertaForTokenClassification",
        _ENCODER | _TOKENS,
        (*_ROBERTA, NumClasses()),
        (*_ROBERTA_ENCODER, *_CLASSIFIER),
        _POOLER,
    ),
    _family("RobertaModel", _ENCODER | _STATES, _ROBERTA, _BARE_ENCODER),
)
