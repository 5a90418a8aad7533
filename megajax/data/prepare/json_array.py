"""Reads a JSON file that is one array, element by element."""

import codecs
import io
import json

PIECE_BYTES = 1 << 18  # read at a time, at least


class JsonArray:
    """Elements of an array as if they were lines: memory is that of the longest element, not of the file."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0
        self._is_open = False

    def readline(self, limit: int) -> bytes:
        """The text of the next element, b"" at the end. Raises ValueError for what is not JSON and for an element of
        more than `limit` bytes, EOFError if the array does not end."""
        character = self._next_character()
        if not self._is_open and character != "[":
            raise ValueError("the file is no array [...] of records")
        if not self._is_open or character == ",":
            self._is_open = True
            self._position += 1
            character = self._next_character()
        elif character not in ("]", ""):
            raise ValueError(f"a comma is missing before {character!r}")
        if not character:
            raise EOFError("the file ends within its array")
        return b"" if character == "]" else self._element(limit)

    def _next_character(self) -> str:
        """The first one from the position on that is not a space, "" at the end of the file; moves to it."""
        while True:
            rest = self._text[self._position : self._position + 1]
            if rest and not rest.isspace():
                return rest
            self._position += len(rest)
            if not rest and not self._read_more():
                return ""

    def _element(self, limit: int) -> bytes:
        while True:
            try:
                end = self._parse(self._text, self._position)[1]
                break
            except json.JSONDecodeError as error:  # the element is wrong, or not read to its end
                if len(self._text) - self._position > limit or not self._read_more():
                    raise ValueError(f"not JSON: {error.msg}") from None
        element = self._text[self._position : end].encode()
        if len(element) > limit:
            raise ValueError(f"a record of more than {limit:,} bytes; allow it with --max_document_bytes")
        self._position = end
        return element

    def _read_more(self) -> bool:
        """Whether the file had more. Reads as much again as is not used yet, so that a long element costs no more than
        twice its parsing."""
        rest = self._text[self._position :]
        piece = self._file.read(max(PIECE_BYTES, len(rest)))
        self._text = rest + self._decode(piece, not piece)
        self._position = 0
        return bool(piece)
