"""A Hugging Face folder that reads images: conversations are prepared, its text is trained, and what is exported
answers questions about images, its tower as it was."""

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest

import configs
import megajax
from megajax.data.preprocess import main as preprocess
from megajax.inference.config import ServingConfig
from megajax.inference.engine import Engine
from megajax.inference.tokens.sampling import Sampling
from megajax.overrides import override
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.tensor_files import TensorFiles

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("tokenizers")
WEIGHTS = Path(__file__).parents[1] / "weights" / "hugging_face"
IMAGE = 260


def written_by_hand():
    """The module with the folders of the tests of Hugging Face."""
    spec = importlib.util.spec_from_file_location("folders_by_hand", WEIGHTS / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny LLaVA with a tokenizer of bytes, in which token 260 is <image>."""
    hands = written_by_hand()
    folder = tmp_path_factory.mktemp("llava") / "llava"
    recorded = np.load(Path(__file__).parents[1] / "oracles" / "multimodal.npz")
    entry = json.loads(str(recorded["models"]))["llava"]
    entry["options"]["image_token_index"] = IMAGE
    entry["options"]["text_config"]["vocab_size"] = 264
    for name, (shape, _) in entry["tensors"].items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            shape[0] = 264
    hands.write_described(folder, entry)
    hands.write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = dict(tokenizer["added_tokens"][-1], id=IMAGE, content="<image>")
    tokenizer["added_tokens"].append(special)
    path.write_text(json.dumps(tokenizer))
    processor = dict(
        image_processor_type="CLIPImageProcessor", size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12}
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def picture(red: int) -> bytes:
    file = io.BytesIO()
    PIL.new("RGB", (20, 16), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def chats(folder, tmp_path_factory):
    """The prefix of conversations about red and dark pictures."""
    place = tmp_path_factory.mktemp("chats")
    lines = []
    for number in range(24):
        red = 250 * (number % 2)
        (place / f"{number}.png").write_bytes(picture(red))
        turns = [dict(value="<image>\nred?"), dict(value="yes" if red else "no")]
        turns[0]["from"], turns[1]["from"] = "human", "gpt"
        lines.append(json.dumps(dict(image=f"{number}.png", conversations=turns)))
    (place / "chats.jsonl").write_text("\n".join(lines))
    preprocess([
        "--conversations", f"--input={place / 'chats.jsonl'}", f"--output_prefix={place / 'chats'}",
        f"--tokenizer={folder / 'tokenizer.json'}", "--image_token=<image>", "--workers=0",
    ])  # fmt: skip
    return str(place / "chats")


def test_a_folder_is_fine_tuned_exported_and_answers(folder, chats, tmp_path):
    config = override(
        configs.recipe(f"hugging_face:{folder}"),
        [
            f"--run_dir={tmp_path / 'run'}", "--task.kind=conversations", f"--data.paths={chats}",
            f"--data.cache_dir={tmp_path}", "--training.sequence_length=64", "--training.global_batch_size=8",
            "--mesh.data=8",
            "--training.steps=40", "--training.eval_every_steps=40", "--training.eval_steps=1", "--data.split=20,4,0",
            "--model.vision.blocks=2", "--model.vision.patches=10", "--training.frozen=vision_layers.*,vision.patch",
            "--optimizer.learning_rate=3e-2", "--precision.compute=float32", "--checkpoint.every_steps=40",
        ],
    )  # fmt: skip
    assert megajax.Run(config).train() == "finished"
    export_run(tmp_path / "run", tmp_path / "out")
    before = TensorFiles(folder)
    after = TensorFiles(tmp_path / "out")
    for name in after.forms:
        old = name if name in before.forms else name.replace(".vision_model", "")
        is_frozen = ".encoder.layers." in name or "patch_embedding" in name
        assert np.array_equal(before[old], after[name]) == is_frozen, name
    engine = Engine.from_run(
        tmp_path / "out", serving=ServingConfig(max_length=64, num_pages=16, page_size=8, max_rows=2)
    )
    assert engine.prompts.image_token == "<image>"
    sampling = Sampling(temperature=0.0, max_tokens=4)
    texts = []
    for red in (0, 250):
        prompt = engine.prompts.tokenizer.encode_template("<s><|user|><image>\nred?<|assistant|>")
        request = engine.submit(prompt, sampling, images=[engine.prompts.read_image(picture(red))])
        found = ""
        while not request.is_finished:
            found += "".join(output.text for output in engine.step())
        texts.append(found)
    assert texts == ["no", "yes"]
