"""The server that embeds: a real client gets the unit vectors of what the model alone says of each text."""

from types import SimpleNamespace

import httpx2
import jax
import numpy as np
import openai
import pytest

from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.embedding import make_embedding_app
from megajax.inference.text_encoder import DecoderEncoder, TextEncoder
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.bert import BertConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from servers import MODEL, random_params, running, wait_until

BERT = BertConfig(num_layers=1, embed_dim=32, num_heads=2, vocab_size=264, max_positions=64)
TEXTS = ["Once upon a time", "x", "äöü", "one two three four five six seven eight "]
START = 7  # before each text of the decoder


def encoder_of(config):
    model = Model(config, PrecisionConfig(compute="float32"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = jax.device_put(random_params(model, 0), model.shardings(mesh))
    opened = SimpleNamespace(
        model=model, mesh=mesh, tokenizer=BytesTokenizer(), source="a test", start_ids=(START,), restore=lambda: params
    )
    return (TextEncoder if config is BERT else DecoderEncoder)(opened), params


@pytest.fixture(scope="module", params=[BERT, MODEL], ids=["bert", "decoder"])
def served(request):
    encoder, params = encoder_of(request.param)
    config = ServerConfig(model_name="tiny", max_requests=40)
    with running(make_embedding_app(encoder, config, max_length=50), config) as url:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        yield encoder, params, url


def alone(encoder, params, text):
    """The unit vector of a text that is not padded, and how many tokens were read."""
    ids = list(text.encode())
    special = encoder.special
    ids = [special.cls_id, *ids, special.sep_id] if encoder.model.config is BERT else [START, *ids]
    tokens = np.array([ids], np.int32)
    batch = {"tokens": tokens, "positions": np.arange(len(ids), dtype=np.int32)[None]}
    if encoder.model.config is BERT:
        batch |= {"segment_ids": np.ones_like(tokens), "token_types": np.zeros_like(tokens)}
    with jax.set_mesh(encoder.mesh):
        hidden = encoder.model.module(params).hidden(batch)[0]
    mean = np.asarray(hidden[0], np.float64).mean(axis=0)
    return mean / np.linalg.norm(mean), len(ids)


def test_embeddings_are_those_of_each_text_alone(served):
    encoder, params, url = served
    want, counts = zip(*(alone(encoder, params, text) for text in TEXTS), strict=True)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for given in ({"input": TEXTS}, {"input": TEXTS, "encoding_format": "float"},
                      {"input": [list(text.encode()) for text in TEXTS]}):  # fmt: skip
            answer = client.embeddings.create(model="tiny", **given)  # in base64 unless told
            found = [item.embedding for item in sorted(answer.data, key=lambda item: item.index)]
            np.testing.assert_allclose(found, want, atol=1e-5)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)
        for one in (TEXTS[0], list(TEXTS[0].encode())):
            (item,) = client.embeddings.create(model="tiny", input=one).data
            np.testing.assert_allclose(item.embedding, want[0], atol=1e-5)
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_what_cannot_be_embedded_is_named(served):
    _, _, url = served
    for body, status, param, message in (
        ({"input": []}, 400, "input", "1 to 2048"),
        ({"input": ["a", "b" * 60]}, 400, None, "text 2 has"),
        ({"input": "b" * 200}, 400, "input", "200 characters"),
        ({"input": [1, 999]}, 400, None, "text 1 has token ids 1 to 999"),
        ({"input": "a", "dimensions": 8}, 400, "dimensions", "not supported"),
        ({"input": "a", "model": "other"}, 404, "model", "tiny"),
        ({"input": ["a"] * 41}, 400, None, "ask for at most 20"),
    ):
        answer = httpx2.post(f"{url}/v1/embeddings", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param) and message in error["message"], error
