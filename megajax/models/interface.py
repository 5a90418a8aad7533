"""The interface between a model family and everything that trains, plans, saves or serves it.

A family is one file: a config that derives from ModelConfig, and the nnx.Module that it builds. The class registers
itself by its `kind`, which is also the tag in config.json; no other file refers to it by name. Properties of the layers
come from the layers themselves (layers/layer.py), not from the model.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.kinds import Kinds
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Flops, LayerConfig, Totals, read_by_layers
from megajax.layers.linear import Linear
from megajax.layers.stack import Stack, add_by_name, add_totals
from megajax.layers.transform import Transform
from megajax.media.kinds import IMAGE
from megajax.media.rows import MediaInputs, of_kind
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.execution import ExecutionConfig
from megajax.ops.cross_entropy import cross_entropy
from megajax.ops.mailboxes import gathered
from megajax.ops.matmul import matmul
from megajax.ops.token_scores import TokenScores, token_scores
from megajax.ops.vocabulary import finish_logits
from megajax.parallel.schedule import Stages
from megajax.precision import Recipe
from megajax.retrieval.inputs import NeighbourInputs


class LossTerms(NamedTuple):
    main: jax.Array
    """float32 scalar: the weighted sum of the token losses. Summed over microbatches; the loss of an evaluation."""
    auxiliary: dict[str, jax.Array] = {}
    """float32 scalars that are added to the training loss, averaged over microbatches."""
    metrics: dict[str, jax.Array] = {}
    """float32 scalars that are not part of the loss, averaged over microbatches."""
    further: dict[str, jax.Array] = {}
    """float32 scalars that are added to the training loss; weighted sums over tokens like the main term, so they are
    summed over microbatches, but not part of the loss of an evaluation."""
    rates: dict[str, tuple[jax.Array, jax.Array]] = {}
    """(numerator, denominator), float32 scalars summed over microbatches; only of an evaluation
    (EVALUATION)."""

    def with_layers(self, *stacks: Totals) -> "LossTerms":
        """The same, plus the auxiliary losses and metrics of the layers of each stack."""
        terms = add_totals(stacks)
        means = {name: value / count for name, (value, count) in terms.metrics.items()}
        auxiliary = add_by_name(self.auxiliary, terms.auxiliary)
        return self._replace(auxiliary=auxiliary, metrics=self.metrics | means)

    def share(self, num_microbatches: int) -> "LossTerms":
        """The contribution of one of `num_microbatches` microbatches: they add up to the terms of a step."""
        auxiliary, metrics = jax.tree.map(lambda a: a / num_microbatches, (self.auxiliary, self.metrics))
        return self._replace(auxiliary=auxiliary, metrics=metrics)

    def total(self) -> jax.Array:
        """The training loss."""
        return sum((*self.auxiliary.values(), *self.further.values()), self.main)


class BatchArray(NamedTuple):
    """An array of a batch, without the leading dims [microbatches, batch] that all of them have."""

    dims: tuple[str | None, ...]
    """Logical axes; a "time" dim is split, and permuted, like the sequence."""
    shape: tuple[int, ...]
    dtype: Any

    @staticmethod
    def sequence(length: int, dtype=jnp.int32) -> "BatchArray":
        return BatchArray(("time",), (length,), dtype)


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """Regularisers of the training loss; an evaluation does not use them."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    evaluates: ClassVar[bool] = False
    """Whether to compute the rates of an evaluation, LossTerms.rates."""


class EvaluationOptions(LossOptions):
    evaluates = True


class Objective(Protocol):
    """What is minimised: the part of a task (tasks/interface.py) that the train step runs."""

    def loss(self, module: "AnyModule", h: jax.Array, batch: dict, options: LossOptions) -> LossTerms: ...


NO_REGULARISERS = LossOptions()
EVALUATION = EvaluationOptions()


StackRole = Literal["embed", "body", "guess"]
"""What a stack is for. body: the stages of a pipeline divide it, and an engine keeps pages for it. embed: runs before
the body, on all ranks of a pipeline, and has no pages: the encoder of a text or of images. guess: runs after the body
as part of the loss, on all ranks of a pipeline; in speculative decoding each of these stacks guesses one more token, in
this order."""


# A search for a mesh asks for the layers of a few models thousands of times.


@functools.lru_cache(maxsize=64)
def _stacks(config: "ModelConfig", execution: ExecutionConfig) -> Mapping[str, tuple[LayerConfig, ...]]:
    return types.MappingProxyType(dict(config.make_stacks(execution)))


@functools.lru_cache(maxsize=64)
def _layers(config: "ModelConfig", execution: ExecutionConfig) -> tuple[LayerConfig, ...]:
    others = [role for role in typing.get_args(StackRole) if role != "body"]
    return sum((layers for role in ("body", *others) for layers in config.stacks_of(role, execution).values()), ())


MODELS = Kinds("model", "megajax.models", default="decoder")


class ModelConfig:
    """Base of the config of a family: a frozen dataclass with a field `kind: Literal[NAME] = NAME`.

    Its fields have defaults and say what the model is; when a run resumes, only those marked with MAY_CHANGE may
    differ. Every check raises ValueError before a device is touched.
    """

    @property
    def kind(self) -> str:
        """Of the family."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        raise NotImplementedError

    reads_source: ClassVar[bool] = False
    """Whether the model reads a text and writes another: its module has `encode` (inference/sequence_to_sequence.py).
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        MODELS.add(cls)

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None) -> "AnyModule":
        """Computes in `dtype`. stages: the pipeline stages for which layers are stored, or None."""
        raise NotImplementedError

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        """Raises ValueError for sizes that do not match each other or the mesh, and for names in `execution` that no
        layer has. A family adds its own checks to these checks of the layers."""
        layers = dict.fromkeys(self.layers(execution))
        modules = {name: None for layer in layers for name in layer.modules}
        activations = {name: None for layer in layers for name in layer.activations(sequence_length)}
        execution.check_names(tuple(modules), tuple(activations))
        for layer in layers:
            layer.check(mesh, sequence_length)

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[LayerConfig, ...]]:
        """The layers of each stack, by the name of the module's attribute, in the order in which they run."""
        raise NotImplementedError

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """Of the matrices of the layers, besides that of precision.recipe: adapters. Runs that have them are exported
        with `without_transforms`."""
        return ()

    @property
    def without_transforms(self) -> "ModelConfig":
        """The same model once they are merged into its matrices."""
        assert not self.transforms, self.kind
        return self

    def check_exports(self) -> None:
        """Raises ValueError for a model whose weights other frameworks would not read as they are meant."""
        if self.transforms:
            names = ", ".join(type(transform).__name__ for transform in self.transforms)
            raise ValueError(
                f"model.kind={self.kind} has transforms beside its matrices ({names}), which other frameworks lack; "
                "merge them first: python -m megajax.convert.export --run=RUN --output=DIR"
            )

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        """The roles of stacks that are not part of the body."""
        return {}

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """The arrays of a batch that the model reads; a task adds those of its loss (tasks/interface.py). packed:
        documents in one sequence do not attend to each other."""
        raise NotImplementedError

    def flops_outside(self, sequence_length: int) -> Flops:
        """FLOPs per token of the forward pass outside the stacks: the output layer."""
        raise NotImplementedError

    def activations_outside(self, sequence_length: int) -> float:
        """Elements per token that are kept for the backward pass by what is in no stack."""
        return 0.0

    def notes(self, sequence_length: int) -> dict[str, str]:
        """What a plan and the start of a run say of the model besides its size: {name: text}."""
        return {}

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens; None: unlimited."""
        return None

    # ------------------------------------------------------------------ derived from the methods above

    def stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[LayerConfig, ...]]:
        """What `make_stacks` returns."""
        return _stacks(self, execution)

    def layers(self, execution: ExecutionConfig) -> tuple[LayerConfig, ...]:
        """The layers of all stacks, those of the body first."""
        return _layers(self, execution)

    def stacks_of(self, role: StackRole, execution: ExecutionConfig) -> dict[str, tuple[LayerConfig, ...]]:
        roles = self.stack_roles
        stacks = self.stacks(execution)
        return {name: layers for name, layers in stacks.items() if roles.get(name, "body") == role}

    @property
    def media(self) -> tuple[MediaInputs, ...]:
        """How the model reads media in its texts, those of each kind that it reads."""
        return ()

    @property
    def image_inputs(self) -> MediaInputs | None:
        """How the model reads images; None: it does not."""
        return of_kind(self.media, IMAGE)

    @property
    def neighbours(self) -> NeighbourInputs | None:
        """How the model reads the neighbours of a text; None: it does not."""
        return None

    @property
    def has_output_layer(self) -> bool:
        """Whether the loss multiplies hidden states by a matrix of the vocabulary."""
        return True

    @property
    def num_stage_layers(self) -> int:
        """Layers that the stages of a pipeline divide among them: those of the body."""
        return sum(map(len, self.stacks_of("body", ExecutionConfig()).values()))

    def forward_flops(self, sequence_length: int) -> Flops:
        """FLOPs per token of the forward pass."""
        layers = [layer.flops(sequence_length) for layer in self.layers(ExecutionConfig())]
        return sum(layers, self.flops_outside(sequence_length))

    @property
    def heads(self) -> tuple[str, ...]:
        """What the loss of a task can read of the model besides its hidden states (AnyModule): next_token,
        masked_token, sentence_order, classes, target_token; none: it cannot be trained."""
        return ("next_token",)

    @property
    def encoder_tasks(self) -> tuple[str, ...]:
        """What inference/text_encoder.py does with the model: fill, embed, classify."""
        return ()

    def check_generates(self) -> None:
        """Raises ValueError for a model that does not continue text."""

    def new_pages(self, sizes: Any, execution: ExecutionConfig) -> dict[str, tuple]:
        """An empty cache in pages for each layer of each stack. sizes: PoolSizes (layers/attention/kv_cache.py)."""
        stacks = self.paged_stacks(sizes, execution)
        return {name: tuple(layer.new_pages(sizes) for layer in layers) for name, layers in stacks.items()}

    def paged_stacks(self, sizes: Any, execution: ExecutionConfig) -> dict[str, tuple[LayerConfig, ...]]:
        """The stacks that an engine runs."""
        guessing = list(self.stacks_of("guess", execution).items())
        return self.stacks_of("body", execution) | dict(guessing[: sizes.num_guesses])


class AnyModule(nnx.Module):
    """Base of the module of a model, with a Stack under each name in `stacks`. A family has the methods that raise
    here.

    Training and scoring given tokens are `hidden`, and a loss from what it returns: `cross_entropy`, `log_probs`, and
    what the heads of the family offer. Generating is `extend` for some more tokens of each row, and `logits`.
    """

    head_recipe: Recipe | None = None
    """The low-precision format of the products of the output layer in the loss (ops/cross_entropy.py); None: the
    compute dtype."""
    embedding: nnx.Param
    """[V, D], of the vocabulary."""
    head: Linear
    """The output layer; a model with tied embeddings has none."""

    def hidden(self, batch: dict, key: DropoutKey | None = None) -> tuple[jax.Array, tuple[Totals, ...]]:
        """batch: arrays [B, ...] as `inputs` names them -> (hidden states [B, T, D], normalised as the heads read them;
        the terms of the layers of each stack). key: for dropout; None: no dropout."""
        raise NotImplementedError

    def extend(self, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        """Reads the next T tokens of each row -> (their hidden states [B, T, D], before `output`; caches).

        batch: tokens, positions, int32 [B, T], and perhaps what layers read (`read_by_layers`)."""
        raise NotImplementedError

    def encode_images(self, batch: dict, index_BT: jax.Array) -> jax.Array:
        """Of a model that reads images: patches, patch_places [B, K, ...] as `inputs` names them, index int32 [B, T] of
        results -> [B, T, 1 + levels, D], which `extend` reads as `image_features`."""
        raise NotImplementedError

    def encode(self, batch: dict) -> jax.Array:
        """Of a model that reads a source: encoder_tokens, encoder_segment_ids (1 for text, 0 for padding) int32 [B, S]
        -> [B, S, D], which `extend` reads."""
        raise NotImplementedError

    def new_caches(self, num_rows: int, length: int) -> dict:
        """Of a model that reads a source: empty caches for `extend`, with room for `length` tokens of each row."""
        raise NotImplementedError

    def guess(self, depth: int, x_BTD: jax.Array, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        """Of a model with stacks that guess: runs number `depth` of these, from 1, which guesses the token depth + 1
        places after each of these tokens -> (its hidden states [B, T, D], {its name: its caches}).

        x: what `extend` returns for these tokens, or `guess` at depth - 1. batch: int32 [B, T]: positions of these
        tokens, and tokens, those `depth` places after them."""
        raise NotImplementedError

    def class_logits(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        """Of a model with the head `classes`: float32 [B, classes], or of tokens [B, T, classes]."""
        raise NotImplementedError

    def pair_logits(self, h_BTD: jax.Array, batch: dict) -> jax.Array:
        """Of a model with the head `sentence_order`: float32 [B, 2], the second text follows the first one, or not."""
        raise NotImplementedError

    def of_first(self, array: jax.Array, batch: dict) -> jax.Array:
        """[B, T, ...] -> [B, ...]: of the first token of each text."""
        raise NotImplementedError

    def output(self, x_BTD: jax.Array) -> jax.Array:
        """The normalised hidden states, which the heads read."""
        raise NotImplementedError

    def head_matrix(self) -> jax.Array:
        """[D, V]: that of `head`, or the transposed `embedding`."""
        return self.head.array() if hasattr(self, "head") else self.embedding[...].T

    def logit_options(self) -> dict[str, Any]:
        """vocab_size, and arguments of `finish_logits` (ops/vocabulary.py)."""
        raise NotImplementedError

    def before_head(self, h_BTD: jax.Array) -> jax.Array:
        """Hidden states as the output layer reads them."""
        return h_BTD

    def cross_entropy(
        self, h_BTD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, options: LossOptions
    ) -> jax.Array:
        """float32 scalar: the sum over tokens of weight * (-log p[label] + regularisers)."""
        return cross_entropy(
            self.before_head(h_BTD),
            self.head_matrix(),
            labels_BT,
            weights_BT,
            recipe=self.head_recipe,
            **dataclasses.asdict(options),
            **self.logit_options(),
        )

    def log_probs(self, h_BTD: jax.Array, labels_BT: jax.Array, **options: Any) -> TokenScores:
        """The log-probability of each label, with a gradient, and the most likely token. options: entropy, top_k,
        logits_dtype (ops/token_scores.py `token_scores`)."""
        return token_scores(self.before_head(h_BTD), self.head_matrix(), labels_BT, **self.logit_options(), **options)

    def further_terms(self, h_BTD: jax.Array, batch: dict, options: LossOptions) -> LossTerms:
        """What the model itself adds to the loss of next tokens, with a main term of 0; batch: with labels and
        loss_weights."""
        return LossTerms(jnp.float32(0))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Of hidden states as `extend` returns them, float32 [B, T, V]; minus infinity for padding of the
        vocabulary."""
        return self.token_logits(self.output(x_BTD))

    def token_logits(self, h_BTD: jax.Array) -> jax.Array:
        """The same of hidden states as `hidden` returns them."""
        products_BTV = matmul(self.before_head(h_BTD), self.head_matrix())
        products_BTV = gathered(constrain(products_BTV, "batch", "time", "vocab")).astype(jnp.float32)
        options = self.logit_options()
        is_token_V = jnp.arange(products_BTV.shape[-1]) < options.pop("vocab_size")
        logits_BTV = finish_logits(products_BTV, **options)
        return jnp.where(is_token_V, logits_BTV, -jnp.inf)


class OneStack(AnyModule):
    """A model that is embed -> one stack, `layers` -> output, which a pipeline can split into stages.

    A family derives from it and has the methods that raise here."""

    layers: Stack

    def embed(self, batch: dict, key: DropoutKey | None) -> jax.Array:
        """-> x [B, T, D] in the compute dtype."""
        raise NotImplementedError

    def entry(self, batch: dict, key: DropoutKey | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """-> (x, other inputs of the first layers that depend on weights, {name: [B, T, D]}). In a pipeline only the
        first stage gets them."""
        return self.embed(batch, key), {}

    def block_inputs(self, batch: dict) -> dict:
        """What every layer reads besides x. Reads no weights: in a pipeline each stage computes it itself."""
        raise NotImplementedError

    def hidden(self, batch: dict, key: DropoutKey | None = None) -> tuple[jax.Array, tuple[Totals, ...]]:
        embed_key, layers_key = split_key(key)
        x_BTD, entered = self.entry(batch, embed_key)
        x_BTD, _, terms = self.layers(x_BTD, self.block_inputs(batch) | entered, key=layers_key)
        return self.output(x_BTD), (terms,)

    def extend(self, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        x_BTD, entered = self.entry(batch, None)
        inputs = self.block_inputs(batch) | entered | read_by_layers(batch)
        x_BTD, layers, _ = self.layers(x_BTD, inputs, caches["layers"])
        return x_BTD, {"layers": layers}


def split_key(key: DropoutKey | None) -> tuple[DropoutKey | None, DropoutKey | None]:
    """-> (key of the embedding, key of the layers)."""
    if key is None:
        return None, None
    of_embedding, of_layers = key.split(2)
    return of_embedding, of_layers
