"""Questions with short answers, about images or without: a file of JSON lines, answered by greedy decoding.

    {"question": "How many?", "answers": ["two", "2"], "image": "a.jpg"}

`answer` may stand for one answer, `image` for a path or several, relative to the folder of images. A model with a chat
template is asked as by a user; any other continues the question.
"""

import dataclasses
import io
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

from megajax.data.tokenizers.chat_template import ChatTemplate, find_chat_template
from megajax.evaluation.answers import METRICS
from megajax.evaluation.text_model import TextModel
from megajax.inference.engine import Engine
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.tokens.sampling import Sampling

Images = Literal["own", "exchanged", "grey"]


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    images: tuple[str, ...]


def read_questions(path: str, folder: str | None, limit: int | None = None) -> list[Question]:
    """folder: of the images; default: that of the file. Raises ValueError, naming the line, for a record without a
    question or an answer, and for an image that is not there."""
    folder = os.path.dirname(path) if folder is None else folder
    with open(path, encoding="utf-8") as file:
        lines = list(itertools.islice(file, limit))
    found = [_question(line, folder, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    if not found:
        raise ValueError(f"data={path} has no questions")
    return found


def _question(line: str, folder: str, where: str) -> Question:
    try:
        record = json.loads(line)
        text = record["question"]
        answers = record.get("answers", [record["answer"]] if "answer" in record else [])
        images = record.get("image", [])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{where}: not an object with a field question") from None
    images = [images] if isinstance(images, str) else images
    texts = [text, *answers, *images] if isinstance(answers, list) and isinstance(images, list) else [None]
    if not answers or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"{where}: question must be a text, answers a list of texts or answer one, image a path")
    paths = tuple(os.path.join(folder, name) for name in images)
    for each in paths:
        if not os.path.isfile(each):
            raise ValueError(f"{where}: the image {each} does not exist")
    return Question(text, tuple(answers), paths)


def evaluate_questions(
    model: TextModel,
    questions: Sequence[Question],
    metric: str,
    *,
    instruction: str = "",
    max_tokens: int = 32,
    images: Images = "own",
) -> dict[str, Any]:
    """{metric: the mean, "questions": their number}.

    instruction: a line after each question. images: exchanged: those of the next question; grey: without contents: what
    a model answers without looking. Raises ValueError for a model that reads no images, and prompts that are too long.
    """
    engine = model.engine
    template = find_chat_template(model.tokenizer, None, engine.prompts.media_tokens)
    files = [question.images for question in questions]
    if images == "exchanged":
        files = [*files[1:], files[0]]
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    numbers = {}
    texts = ["" for _ in questions]
    for number, (question, paths) in enumerate(zip(questions, files, strict=True)):
        read = [_image(engine, path, grey=images == "grey") for path in paths]
        text = f"{question.text}\n{instruction}" if instruction else question.text
        request = engine.submit(_tokens(model, template, text, len(read)), sampling, images=read)
        numbers[request] = number
        if len(numbers) % 256 == 0:  # images of all questions would fill the memory
            _run(engine, numbers, texts)
    _run(engine, numbers, texts)
    score = METRICS[metric]
    values = [score(text, question.answers) for text, question in zip(texts, questions, strict=True)]
    return {metric: sum(values) / len(values), "questions": len(questions)}


def _run(engine: Engine, numbers: dict, texts: list[str]) -> None:
    while engine.has_work:
        for output in engine.step():
            texts[numbers[output.request]] += output.text
    numbers.clear()


def _tokens(model: TextModel, template: ChatTemplate | None, text: str, num_images: int) -> list[int]:
    engine = model.engine
    if template is None:
        return engine.prompts.encode(text, num_images)
    content = [*[{"type": "image"}] * num_images, {"type": "text", "text": text}] if num_images else text
    rendered = template.render([{"role": "user", "content": content}], add_generation_prompt=True)
    return model.tokenizer.encode_template(rendered)


def _image(engine: Engine, path: str, *, grey: bool) -> PromptImage:
    with open(path, "rb") as file:
        data = file.read()
    if grey:
        from megajax.images.decode import size_of

        data = _grey(*size_of(data, path))
    return engine.prompts.read_image(data, path)


def _grey(height: int, width: int) -> bytes:
    from PIL import Image  # optional; size_of has needed it already

    file = io.BytesIO()
    Image.new("RGB", (width, height), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()
