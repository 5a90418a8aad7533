"""Folders written by hand: what transformers would write, without torch."""

import dataclasses
import functools
import json
import logging
import zlib

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from megajax.media.rows import TEXT
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.precision import PrecisionConfig
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.tensor_files import TensorFiles

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=300, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=False, hidden_act="silu", torch_dtype="bfloat16",
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def llama_tensors(options: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    D, F, V = options["hidden_size"], options["intermediate_size"], options["vocab_size"]
    wide = options["num_attention_heads"] * options["head_dim"]
    narrow = options["num_key_value_heads"] * options["head_dim"]
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not options["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(options["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (wide, D), "self_attn.k_proj": (narrow, D), "self_attn.v_proj": (narrow, D),
                "self_attn.o_proj": (D, wide), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
                "input_layernorm": (D,), "post_attention_layernorm": (D,),
            }.items()
        }  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder, options: dict, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(options))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_described(folder, entry: dict) -> None:
    """entry: {"options": config.json, "tensors": {name: [shape, mean]}}; the weights are drawn by their names. Models
    that read images also have "processor": preprocessor_config.json."""
    tensors = {}
    for name, (shape, mean) in entry["tensors"].items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        tensors[name] = np.asarray(mean + 0.15 * rng.standard_normal(shape), np.float32)
    write_folder(folder, entry["options"], tensors)
    if "processor" in entry:
        (folder / "preprocessor_config.json").write_text(json.dumps(entry["processor"]))


@pytest.fixture(scope="session")
def write_drawn():
    return write_described


@pytest.fixture(scope="session")
def transformers():
    pytest.importorskip("torch")
    found = pytest.importorskip("transformers")
    found.logging.disable_progress_bar()
    return found


class Theirs:
    """The model of a folder in float32, as transformers loads it without a word of warning."""

    auto_class = "AutoModelForCausalLM"
    usual_warnings = ("newly initialized",)

    def __init__(self, transformers, folder, *, may_warn: bool = False, may_lack: tuple[str, ...] = ()):
        """may_lack: ends of names of tensors."""
        import torch

        records = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            self.model, info = getattr(transformers, self.auto_class).from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        finally:
            logger.removeHandler(handler)
        parameters = dict(self.model.named_parameters())
        info["missing_keys"] = [
            name for name in info["missing_keys"] if parameters[name].numel() and not name.endswith(may_lack)
        ]
        assert not any(info.values()), info
        messages = (record.getMessage() for record in records)
        warnings = [message for message in messages if not any(usual in message for usual in self.usual_warnings)]
        assert may_warn or not warnings
        self.model.eval()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


class TheirMultimodal(Theirs):
    """Reads images, prepared by the image processor of the folder; in float64, so that only our rounding counts."""

    auto_class = "AutoModelForImageTextToText"
    usual_warnings = (*Theirs.usual_warnings, "within the vocabulary")  # default token ids of the text, and a small one

    def __init__(self, transformers, folder, **how):
        super().__init__(transformers, folder, **how)
        self.model.double()
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder)

    def logits(self, ids: list[int], images: list) -> np.ndarray:
        """ids: one token for each image -> [T, V], with as many tokens for each as the model makes of it."""
        import torch

        config = self.model.config
        image_token = getattr(config, "image_token_id", None) or config.image_token_index
        inputs = self._prepared(images) if images else {}
        counts = [self._num_tokens(image) for image in images]
        spread = []
        for token in ids:
            spread += [token] * (counts.pop(0) if token == image_token else 1)
        tokens = torch.tensor([spread])
        types = (tokens == image_token).int()
        if config.model_type == "gemma3":
            inputs["token_type_ids"] = types
        if config.model_type.startswith("qwen"):
            inputs["mm_token_type_ids"] = types
        with torch.no_grad():
            found = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)
        return found.logits[0].float().numpy()

    def _prepared(self, images: list) -> dict:
        found = self.processor(images, return_tensors="pt")
        names = found.keys() & {"pixel_values", "image_sizes", "image_grid_thw"}
        return {name: found[name].double() if name == "pixel_values" else found[name] for name in names}

    def _num_tokens(self, image) -> int:
        import torch

        with torch.no_grad():
            found = self.model.get_image_features(**self._prepared([image])).pooler_output
        return sum(len(features.flatten(0, -2)) for features in found)


@pytest.fixture(scope="session")
def load_theirs(transformers):
    return functools.partial(Theirs, transformers)


@pytest.fixture(scope="session")
def load_their_multimodal(transformers):
    return functools.partial(TheirMultimodal, transformers)


def noise(height: int, width: int):
    """An image of which every pixel differs from the others."""
    from PIL import Image

    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="session")
def draw_noise():
    pytest.importorskip("PIL")
    return noise


def row_of(config: MultimodalConfig, length: int, conversations: list, blocks: int) -> dict[str, np.ndarray]:
    """The arrays of a row with these conversations: ids, one for each image, and images. blocks: over how many of the
    blocks of the model the views are spread."""
    arrays = {name: np.zeros(array.shape, array.dtype) for name, array in config.inputs(length, packed=True).items()}
    arrays["image_index"][:] = TEXT
    inputs = dataclasses.replace(config.image_inputs, blocks=blocks)
    images = [image for _, images in conversations for image in images]
    views = [config.vision.image.pixels(image) for image in images]
    found = inputs.blocks_of(sizes_of(images), views.__getitem__)
    for name in ("patches", "patch_places"):
        arrays[name][:blocks] = found[name]
    begin = 0
    num_images = 0
    index = found["index"]
    for segment, (ids, images) in enumerate(conversations, 1):
        text = inputs.expanded(np.array(ids), sizes_of(images))
        count = len(text.tokens)
        (number,) = text.numbers
        of_images, index = np.split(index, [np.count_nonzero(number)])
        image_index = np.full(count, TEXT)
        image_index[number > 0] = of_images
        values = {
            "tokens": text.tokens, "positions": np.arange(count), "segment_ids": np.full(count, segment),
            "image_index": image_index, "position_ids": text.positions,
            "block_ids": np.where(number > 0, num_images + number, 0),
        }  # fmt: skip
        for name in arrays.keys() & values.keys():
            arrays[name][begin : begin + count] = values[name]
        begin += count
        num_images += len(images)
    return arrays


def sizes_of(images: list) -> np.ndarray:
    return np.array([(image.height, image.width) for image in images], int).reshape(-1, 2)


@pytest.fixture(scope="session")
def image_row():
    pytest.importorskip("PIL")
    return row_of


def come_back(folder, tmp_path, copies=()) -> None:
    """Imported and exported to tmp_path / "back", the tensors are the same, but for copies that are not written."""
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files, again = TensorFiles(folder), TensorFiles(tmp_path / "back")
    assert set(again.forms) <= set(files.forms) <= {*again.forms, *copies}
    for name in again.forms:
        assert files[name].tobytes() == again[name].tobytes(), name


@pytest.fixture(scope="session")
def assert_same_files():
    return come_back


@pytest.fixture(scope="session")
def our_logits():
    """(folder, token ids [B, T]) -> logits float32 [B, T, V] of a model computed in float32."""

    def logits(folder: Folder, ids: np.ndarray) -> np.ndarray:
        model = Model(folder.model, PrecisionConfig(compute="float32"))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
        batch = {"tokens": ids, "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)}

        @jax.jit
        def run(weights, batch):
            module = model.module(weights)
            x, _, _ = module.layers(module.embed(batch, None), module.block_inputs(batch))
            return module.logits(x)[..., : folder.model.vocab_size]

        with jax.default_matmul_precision("highest"):
            return np.asarray(run(folder.restore_params(form, model.layer_rows), batch))

    return logits


def write_tokenizer(folder) -> None:
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "generation_config.json").write_text(json.dumps(dict(bos_token_id=0, eos_token_id=1, temperature=0.6)))


def write_small_llama(folder) -> None:
    """With as many ids as its tokenizer, which begins every text with <s>."""
    options = LLAMA | dict(vocab_size=260)
    write_folder(folder, options, llama_tensors(options))
    write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = begin
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def small_llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugging_face") / "small_llama"
    write_small_llama(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugging_face") / "llama"
    write_folder(folder, LLAMA, llama_tensors(LLAMA))
    write_tokenizer(folder)
    return folder
