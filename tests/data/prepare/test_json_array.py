"""A JSON array is read element by element, whatever the size of the pieces that a file gives."""

import io
import json

import pytest

from megajax.data.prepare import json_array
from megajax.data.prepare.json_array import JsonArray

RECORDS = [{"a": "é,]}" * 5}, {}, {"b": [1, {"c": None}]}, {"d": "\U0001f600 \n"}, [], {"long": "x" * 300}]


def read(content: bytes, limit: int = 1000) -> list:
    file = JsonArray(io.BufferedReader(io.BytesIO(content)))
    found = []
    while element := file.readline(limit):
        found.append(json.loads(element))
    assert file.readline(limit) == b""
    return found


@pytest.mark.parametrize("piece", [1, 7, 1 << 18])
@pytest.mark.parametrize("indent", [None, 1])
def test_elements_are_those_of_json(piece, indent, monkeypatch):
    monkeypatch.setattr(json_array, "PIECE_BYTES", piece)
    for ascii_only in (True, False):
        text = json.dumps(RECORDS, indent=indent, ensure_ascii=ascii_only)
        assert read(text.encode()) == json.loads(text)
    assert read(b"\xef\xbb\xbf [ ]  ") == []


def test_what_is_no_array_is_refused():
    for content, why in [
        (b"", "no array"),
        (b'{"a": 1}', "no array"),
        (b'[{"a": 1}', "ends within its array"),
        (b'[{"a": 1}, {"a"', "not JSON"),
        (b'[{"a": 1}, {"a" 1}, {}]', "not JSON: Expecting ':'"),
        (b'[{"a": 1} {"a": 1}]', "a comma is missing before '{'"),
        (b'["\xff"]', "utf-8"),
        (b'["' + b"x" * 2000 + b'"]', "a record of more than 1,000 bytes"),
    ]:
        with pytest.raises((ValueError, EOFError), match=why):
            read(content)
