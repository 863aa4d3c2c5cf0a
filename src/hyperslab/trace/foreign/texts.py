"""Text files of other tools, also compressed: read piece by piece, as far as they are whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperslab.errors import FormatError

_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_MOST_CHARACTERS = 1 << 26
"""Of one item of JSON: what is longer is damaged."""
_DECODER = json.JSONDecoder()


class TextFile:
    """A text; ``notes`` tell where it ends too early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def start(self, num: int = 1 << 16) -> str:
        """Its first characters, or fewer where it ends there."""
        found = ""
        for piece in self.pieces():
            found += piece
            if len(found) >= num:
                break
        self.notes.clear()
        return found[:num]

    def pieces(self) -> Iterator[str]:
        rest = b""
        for piece in self._bytes():
            piece = rest + piece
            # A character's bytes stay together: those of the last one may go on.
            cut = next((i for i in range(1, min(4, len(piece) + 1)) if piece[-i] >= 0xC0), 0)
            rest = piece[-cut:] if cut else b""
            yield piece[: len(piece) - cut].decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def lines(self) -> Iterator[str]:
        rest = ""
        for piece in self.pieces():
            *whole, rest = (rest + piece).split("\n")
            yield from whole
        if rest:
            yield rest

    def _bytes(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                is_gzip = file.read(2) == _GZIP
                file.seek(0)
                pieces = iter(lambda: file.read(_PIECE), b"")
                yield from self._inflated(pieces) if is_gzip else pieces
        except OSError as error:
            raise FormatError(f"{self.path} cannot be read: {error.strerror}") from error

    def _inflated(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Of any number of gzip members, one after another."""
        stream = zlib.decompressobj(wbits=31)
        try:
            for piece in pieces:
                while piece:
                    if stream.eof:
                        stream = zlib.decompressobj(wbits=31)
                    yield stream.decompress(piece)
                    piece = stream.unused_data
        except zlib.error as error:
            self.notes.append(f"{self.path} is damaged: {error}; what comes before it was read")
            return
        if not stream.eof:
            self.notes.append(f"{self.path} is cut off within its compressed data")


class JsonEvents:
    """A JSON object of which one member is a long list: its items one by one, the rest in ``head``.

    Members after the list are in ``head`` once all items were taken.
    """

    def __init__(self, file: TextFile, member: str) -> None:
        self._file, self._member = file, member
        self._pieces = file.pieces()
        self._text, self._at = "", 0
        self.head: dict[str, Any] = {}
        self.num_items = 0

    def items(self) -> Iterator[Any]:
        try:
            self._expect("{")
            while not self._skips("}"):
                name = self._value()
                self._expect(":")
                if name == self._member and self._skips("["):
                    yield from self._items_of_list()
                else:
                    self.head[str(name)] = self._value()
                self._skips(",")
        except (ValueError, RecursionError):
            self._file.notes.append(
                f"{self._file.path} is cut off or damaged: what comes after "
                f"{self.num_items} events was left out"
            )

    def _items_of_list(self) -> Iterator[Any]:
        while not self._skips("]"):
            yield self._value()
            self.num_items += 1
            self._skips(",")

    def _value(self) -> Any:
        """The next; a number at the end of what is there may go on."""
        more = True
        while more:
            self._next_character()
            try:
                value, stop = _DECODER.raw_decode(self._text, self._at)
                if stop < len(self._text) or not (more := self._read_on()):
                    self._at = stop
                    return value
            except ValueError:
                if not (more := self._read_on()):
                    raise
        raise ValueError("ends too early")

    def _next_character(self) -> str:
        while True:
            while self._at < len(self._text):
                if not (character := self._text[self._at]).isspace():
                    return character
                self._at += 1
            if not self._read_on():
                raise ValueError("ends too early")

    def _skips(self, character: str) -> bool:
        found = self._next_character() == character
        self._at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._skips(character):
            raise ValueError(f"no {character}")

    def _read_on(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None or len(self._text) - self._at > _MOST_CHARACTERS:
            return False
        self._text, self._at = self._text[self._at :] + piece, 0
        return True
