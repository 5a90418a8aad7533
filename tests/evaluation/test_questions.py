"""Questions about images: what is asked, and how answers are counted."""

import io
import json
from types import SimpleNamespace

import pytest

from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.evaluation.questions import evaluate_questions, read_questions
from megajax.inference.results import Output

PIL = pytest.importorskip("PIL.Image")


class Prompts:
    media_tokens = {"image": "<image>"}

    def read_image(self, data, name):
        return PIL.open(io.BytesIO(data)).getpixel((0, 0))[0]

    def encode(self, text, num_images):
        return [257] * num_images + list(text.encode())


class Engine:
    """Answers with the red of the first pixel of the image."""

    prompts = Prompts()

    def __init__(self):
        self.answers = []
        self.asked = []

    def submit(self, tokens, sampling, images):
        assert sampling.temperature == 0
        self.asked.append(bytes(token for token in tokens if token < 256).decode())
        self.answers.append(str(images[0]) if images else "none")
        return len(self.answers) - 1

    @property
    def has_work(self):
        return any(self.answers)

    def step(self):
        for number, answer in enumerate(self.answers):
            if answer:
                yield Output(number, 0, [], answer, "stop", None, None)
                self.answers[number] = ""


@pytest.fixture
def path(tmp_path):
    for red in (10, 20):
        PIL.new("RGB", (3, 2), (red, 0, 0)).save(tmp_path / f"{red}.png")
    records = [
        dict(question="red?", answers=["10", "ten"], image="10.png"),
        dict(question="red?", answer="20", image=["20.png"]),
        dict(question="none?", answer="none"),
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("look, right", [("own", 3), ("exchanged", 0), ("grey", 1)])
def test_answers_are_counted_with_the_image_another_one_or_none(path, look, right):
    model = SimpleNamespace(engine=Engine(), tokenizer=BytesTokenizer(("<image>",)))
    found = evaluate_questions(
        model, read_questions(str(path), None), "exact_match", instruction="A number.", images=look
    )
    assert found == {"exact_match": right / 3, "questions": 3}
    assert model.engine.asked[0] == "red?\nA number."


@pytest.mark.parametrize("line, message", [
    ("[]", "line 1: not an object with a field question"),
    ('{"question": "a"}', "answers a list of texts or answer one"),
    ('{"question": "a", "answer": "b", "image": "missing.png"}', "missing.png does not exist"),
    ("", "has no questions"),
])  # fmt: skip
def test_records_that_cannot_be_asked_are_named(tmp_path, line, message):
    (tmp_path / "q.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_questions(str(tmp_path / "q.jsonl"), None)
