"""Samples of WebDataset tars, which Energon folders consist of: members with the same name up to its first dot.

`x.json` holds the record, or `x.txt` the caption; the images of a sample are its image files, in the order of the tar,
its clips of sound the .wav files. Only the headers of the tar are read here. Images and clips are not copied: they are
found again by offset and size.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from megajax.data.prepare.image_records import MediaSource
from megajax.media.kinds import AUDIO, IMAGE, Kind

SUFFIXES = {IMAGE: {"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"}, AUDIO: {"wav"}}


class Member(NamedTuple):
    suffix: str
    """What follows the last dot of its name, in lower case."""
    offset: int
    num_bytes: int


class TarSample(NamedTuple):
    path: str
    """Of the tar."""
    key: str
    members: tuple[Member, ...]

    def media(self, kind: Kind) -> list[MediaSource]:
        found = [member for member in self.members if member.suffix in SUFFIXES[kind]]
        return [MediaSource(self.path, member.offset, member.num_bytes) for member in found]

    def record(self, max_bytes: int) -> Any:
        """Of the json member; a txt member is its caption. Raises ValueError if neither can be read."""
        texts = {member.suffix: member for member in self.members if member.suffix in ("json", "txt")}
        if not texts:
            raise ValueError("the sample has neither a .json nor a .txt")
        found = {suffix: self._text(member, max_bytes) for suffix, member in texts.items()}
        caption = {"caption": found["txt"]} if "txt" in found else {}
        if "json" not in found:
            return caption
        try:
            record = json.loads(found["json"])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
        return caption | record if isinstance(record, dict) else record

    def _text(self, member: Member, max_bytes: int) -> str:
        if member.num_bytes > max_bytes:
            raise ValueError(f"its .{member.suffix} has {member.num_bytes:,} bytes; allow it with --max_document_bytes")
        with open(self.path, "rb") as file:
            file.seek(member.offset)
            data = file.read(member.num_bytes)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"its .{member.suffix} is not UTF-8 ({error.reason} at byte {error.start})") from None


def tar_samples(path: str) -> Iterator[TarSample]:
    """The samples of a tar, in its order. Raises tarfile.TarError where it is damaged."""
    key = ""
    members: list[Member] = []
    with tarfile.open(path, "r:") as tar:
        while (info := tar.next()) is not None:
            tar.members = []  # pyrefly: ignore[missing-attribute]  would grow with the tar
            folder, name = os.path.split(info.name)
            stem, _, suffixes = name.partition(".")
            if not info.isreg() or info.issparse() or not stem or not suffixes:
                continue
            if members and key != os.path.join(folder, stem):
                yield TarSample(path, key, tuple(members))
                members = []
            key = os.path.join(folder, stem)
            members.append(Member(suffixes.rpartition(".")[2].lower(), info.offset_data, info.size))
        end = tar.offset
    if members:
        yield TarSample(path, key, tuple(members))
    with open(path, "rb") as file:
        file.seek(end)
        # tarfile takes any damaged header, and the end of the file, as the end of the tar
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it is damaged or cut short at byte {end}")
