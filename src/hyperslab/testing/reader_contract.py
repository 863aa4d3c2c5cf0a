"""What every file format must do: tests that a new one inherits."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from hyperslab.errors import FormatError, HyperslabError
from hyperslab.io import ArrayReader, Format
from hyperslab.io.engine import files
from hyperslab.io.reader import find_format
from hyperslab.layout import Box, Span
from hyperslab.testing.specimens import (
    UNTOUCHED,
    boxes,
    buffers,
    changed,
    copy_of,
    damaged,
    num_open_files,
    numbered,
    random_boxes,
    read,
    slices,
    truncations,
)


class ReaderContract:
    """Subclass it as ``TestMyFormat``, write a file, and inherit every test.

    A format is tried in each of its ``ways`` to write an array: contiguous and chunked, compressed
    and not. Only ``HyperslabError`` may come of files that are not right.
    """

    format: ClassVar[str]
    """Its name, as ``register_format`` has it."""
    file_name: ClassVar[str] = "array.data"
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    """Keyword arguments for ``write``, by a name for each."""
    dtypes: ClassVar[Sequence[str]] = ("uint8", "int16", "int32", "int64", "float32", "float64")
    shapes: ClassVar[Sequence[tuple[int, ...]]] = ((7,), (1, 1, 1), (5, 6), (3, 4, 5, 6))
    big_shape: ClassVar[tuple[int, ...]] = (3, 40, 70, 50)
    """Of an array that has several chunks, where there are any."""
    is_checksummed: ClassVar[bool] = False
    """Whether damage to any byte of the data is found."""
    num_damaged: ClassVar[int] = 100

    def write(self, path: Path, array: NDArray[Any], **how: Any) -> Path:
        """Writes ``array`` at ``path``, with another suffix if need be, and says where it is."""
        raise NotImplementedError

    def name(self, path: Path, array: NDArray[Any]) -> str:
        """Of the array that was written, by default the only one there is."""
        (name,) = self.cls(path).names(path, **self.options(array))
        return name

    def options(self, array: NDArray[Any]) -> dict[str, Any]:
        """What must be said to open the file of ``array``."""
        return {}

    # The tools of the tests.

    def cls(self, path: Path) -> type[Format]:
        return find_format(path, self.format)

    def opened(self, path: Path, array: NDArray[Any], name: str | None = None) -> ArrayReader:
        name = self.name(path, array) if name is None else name
        (reader,) = self.cls(path).open(path, [name], **self.options(array))
        return reader

    def attempt(self, path: Path, array: NDArray[Any]) -> NDArray[Any] | None:
        """What the file gives, or None if it is refused, or no longer has that shape and dtype."""
        try:
            reader = self.opened(path, array, self._known_name)
            if reader.shape != array.shape or reader.dtype != array.dtype:
                read(reader, Box(tuple(Span(0, min(4, n)) for n in reader.shape)))
                return None
            return read(reader)
        except HyperslabError:
            return None

    def parts(self, path: Path) -> list[Path]:
        """The files to damage."""
        return sorted(part for part in path.rglob("*") if part.is_file()) or [path]

    _known_name: str | None = None

    def make(
        self, path: Path, array: NDArray[Any], how: Mapping[str, Any]
    ) -> tuple[Path, ArrayReader]:
        written = self.write(path / self.file_name, array, **how)
        self._known_name = self.name(written, array)
        return written, self.opened(written, array)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        contract = metafunc.cls
        assert contract is not None
        if "how" in metafunc.fixturenames:
            metafunc.parametrize("how", contract.ways.values(), ids=contract.ways.keys())
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", contract.dtypes)
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", contract.shapes, ids=str)

    # What is in the file.

    def test_shape_dtype_and_contents(
        self, tmp_path: Path, how: Mapping[str, Any], dtype: str
    ) -> None:
        array = numbered((3, 4, 5), dtype)
        _, reader = self.make(tmp_path, array, how)
        assert reader.shape == array.shape
        assert reader.dtype == array.dtype
        assert reader.dtype.isnative
        np.testing.assert_array_equal(read(reader), array)

    def test_arrays_of_any_number_of_dims(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        array = numbered(shape, self.dtypes[0])
        _, reader = self.make(tmp_path, array, next(iter(self.ways.values())))
        assert reader.shape == shape
        np.testing.assert_array_equal(read(reader), array)

    @pytest.mark.hypothesis
    def test_any_box_into_any_strides(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered((4, 9, 6, 11), self.dtypes[0])
        _, reader = self.make(tmp_path, array, how)

        @settings(max_examples=40, deadline=None)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            box = data.draw(boxes(array.shape))
            out, around = data.draw(buffers(box.shape, array.dtype))
            reader.read(box, out)
            np.testing.assert_array_equal(out, array[slices(box)])
            out[...] = np.frombuffer(bytes([UNTOUCHED] * out.itemsize), out.dtype)[0]
            assert (around == UNTOUCHED).all(), "bytes beside the buffer's were written to"

        check()

    def test_boxes_of_a_big_array(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered(self.big_shape, self.dtypes[1])
        _, reader = self.make(tmp_path, array, how)
        for box in [*random_boxes(array.shape, 12), Box.whole(array.shape)]:
            np.testing.assert_array_equal(read(reader, box), array[slices(box)])

    def test_an_empty_box_reads_nothing(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered((4, 5, 6), self.dtypes[0])
        _, reader = self.make(tmp_path, array, how)
        for box in (Box.of((2, 2), (0, 5), (0, 6)), Box.of((0, 4), (0, 5), (6, 6))):
            assert read(reader, box).shape == box.shape

    def test_many_threads_read_at_once(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered(self.big_shape, self.dtypes[1])
        _, reader = self.make(tmp_path, array, how)
        wanted = random_boxes(array.shape, 48)
        with ThreadPoolExecutor(8) as threads:
            found = threads.map(lambda box: read(reader, box), wanted)
            for box, values in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(values, array[slices(box)])

    def test_an_array_without_items_is_read_or_refused(self, tmp_path: Path) -> None:
        array = np.zeros((0, 3), self.dtypes[0])
        try:
            _, reader = self.make(tmp_path, array, next(iter(self.ways.values())))
        except (HyperslabError, ValueError):  # of ours, or of who writes the file
            return
        assert read(reader).shape == (0, 3)

    def test_names_lists_the_array(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered((3, 4, 5), self.dtypes[0])
        path, _ = self.make(tmp_path, array, how)
        assert self._known_name in self.cls(path).names(path, **self.options(array))

    def test_an_unknown_array_is_refused_by_name(self, tmp_path: Path) -> None:
        array = numbered((3, 4, 5), self.dtypes[0])
        path, _ = self.make(tmp_path, array, next(iter(self.ways.values())))
        with pytest.raises(FormatError, match="no-such-array") as caught:
            self.opened(path, array, "no-such-array")
        assert str(self._known_name) in str(caught.value), "it should say which arrays there are"

    def test_storage_says_how_it_lies_on_disk(self, tmp_path: Path, how: Mapping[str, Any]) -> None:
        array = numbered(self.big_shape, self.dtypes[1])
        path, reader = self.make(tmp_path, array, how)
        storage = reader.storage()
        assert storage.kind
        assert 0 < storage.nbytes <= sum(part.stat().st_size for part in self.parts(path))
        assert storage.chunks is None or len(storage.chunks) == array.ndim

    # Files that are not right.

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        self.check_refused(tmp_path / self.file_name)

    def test_a_directory_in_place_of_a_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / self.file_name
        path.mkdir()
        self.check_refused(path)

    def test_an_empty_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / self.file_name
        path.touch()
        self.check_refused(path)

    def test_a_file_of_something_else_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / self.file_name
        path.write_bytes(random.Random(0).randbytes(1000))
        self.check_refused(path)

    def check_refused(self, path: Path) -> None:
        array = numbered((3, 4, 5), self.dtypes[0])
        with pytest.raises(FormatError) as caught:
            read(self.opened(path, array))
        assert str(path) in str(caught.value), "the file should be named"

    def test_a_file_that_may_not_be_read_is_named(self, tmp_path: Path) -> None:
        array = numbered((3, 4, 5), self.dtypes[0])
        path, _ = self.make(tmp_path, array, next(iter(self.ways.values())))
        self.parts(path)[-1].chmod(0)
        if os.access(self.parts(path)[-1], os.R_OK):
            pytest.skip("this user may read every file")
        with pytest.raises(FormatError, match="permission"):
            read(self.opened(path, array, self._known_name))

    def test_a_truncated_file_is_refused_or_read_right(
        self, tmp_path: Path, how: Mapping[str, Any]
    ) -> None:
        array = numbered((6, 10, 10), self.dtypes[1])
        path, _ = self.make(tmp_path, array, how)
        for part in self.parts(path):
            whole = part.read_bytes()
            for size in truncations(len(whole)):
                part.write_bytes(whole[:size])
                found = self.attempt(path, array)
                assert found is None or np.array_equal(found, array), f"{part} cut to {size} bytes"
            part.write_bytes(whole)

    def test_damage_anywhere_is_refused_or_read(
        self, tmp_path: Path, how: Mapping[str, Any]
    ) -> None:
        """Wrong data comes only of formats without checksums; no other error comes of any."""
        array = numbered((6, 10, 10), self.dtypes[1])
        path, _ = self.make(tmp_path, array, how)
        dice = random.Random(0)
        for _ in range(self.num_damaged):
            part = dice.choice(self.parts(path))
            with changed(part, damaged(part.read_bytes(), dice)):
                found = self.attempt(path, array)
            if self.is_checksummed:
                assert found is None or np.array_equal(found, array)

    def test_a_damaged_bit_of_the_data_is_refused_or_one_item_is_wrong(
        self, tmp_path: Path, how: Mapping[str, Any]
    ) -> None:
        array = numbered((6, 10, 10), self.dtypes[1])
        path, _ = self.make(tmp_path, array, how)
        places = self.data_places(tmp_path / "other", path, array, how)
        if not places:
            pytest.skip("compressed: a bit may stand for many items")
        for part, place in random.Random(0).sample(places, 8):
            content = bytearray(part.read_bytes())
            content[place] ^= 1
            with changed(part, bytes(content)):
                found = self.attempt(path, array)
            if found is not None:
                assert not self.is_checksummed
                assert (found != array).sum() == 1, f"byte {place} of {part} was damaged"

    def data_places(
        self, aside: Path, path: Path, array: NDArray[Any], how: Mapping[str, Any]
    ) -> list[tuple[Path, int]]:
        """Where the files at ``path`` hold the bytes of ``array``, if each has a place of its own.

        They are those that differ from the bytes of another array, which has no byte in common.
        """
        aside.mkdir()
        inverted = (~array.view(np.uint8)).view(array.dtype)
        others = self.parts(self.write(aside / self.file_name, inverted, **how))
        places = [
            (part, place)
            for part, other in zip(self.parts(path), others, strict=True)
            for place, (a, b) in enumerate(zip(part.read_bytes(), other.read_bytes(), strict=False))
            if a != b
        ]
        is_stored_plainly = len(places) >= array.nbytes
        return places if is_stored_plainly else []

    def test_a_file_that_changes_while_it_is_read_is_noticed(
        self, tmp_path: Path, how: Mapping[str, Any]
    ) -> None:
        array = numbered((6, 10, 10), self.dtypes[1])
        path, reader = self.make(tmp_path, array, how)
        np.testing.assert_array_equal(read(reader), array)
        self.rewrite(tmp_path / "other", path, array[::-1].copy(), how)
        with pytest.raises(FormatError):
            read(reader)
        np.testing.assert_array_equal(read(self.opened(path, array)), array[::-1])

    def rewrite(self, aside: Path, path: Path, array: NDArray[Any], how: Mapping[str, Any]) -> None:
        """Writes ``array`` into the very files at ``path``, a second after the last change."""
        aside.mkdir()
        other = self.write(aside / self.file_name, array, **how)
        for new, old in zip(self.parts(other), self.parts(path), strict=True):
            later = old.stat().st_mtime_ns + 10**9
            old.write_bytes(new.read_bytes())
            os.utime(old, ns=(later, later))

    def test_many_files_do_not_stay_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "MAX_OPEN", 4)
        array = numbered((3, 4, 5), self.dtypes[0])
        path, _ = self.make(tmp_path, array, next(iter(self.ways.values())))
        copies = [copy_of(path, f"{number}-{path.name}") for number in range(24)]
        readers = [self.opened(copied, array) for copied in copies]
        before = num_open_files()
        for reader in readers:
            np.testing.assert_array_equal(read(reader), array)
        assert num_open_files() <= before + 8
