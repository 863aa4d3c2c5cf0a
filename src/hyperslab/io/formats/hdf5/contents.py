"""What the HDF5 library tells of a file and its datasets; runs in the process of ``child.py``."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.io.formats.hdf5.child import Answer, Refusal

DONT_FILTER_PARTIAL_CHUNKS = 2
MAX_LISTED = 20
MAX_VALUES = 1024
"""Of an attribute that is taken for a target."""
MAX_LINKS = 16
"""That lead from one to the next; the library follows as many."""

REFUSED = ", which external=False refuses"


def names(path: str, external: bool = True) -> Answer:
    with h5py.File(path, "r") as file:
        return {"names": [name for name, _ in _walk(file, external)]}, None


def _walk(file: Any, external: bool) -> Iterator[tuple[str, Any]]:
    """All datasets with their names, those behind links too."""
    groups, seen = [("", file)], set()
    while groups:
        prefix, group = groups.pop()
        info = h5py.h5o.get_info(group.id)
        if (key := (info.fileno, info.addr)) in seen:  # links may lead back
            continue
        seen.add(key)
        for name in group:
            try:
                item = group[name] if external else _inside(file, f"{group.name}/{name}")
            except (KeyError, OSError, RuntimeError, Refusal):  # a link that leads nowhere
                continue
            if isinstance(item, h5py.Dataset):
                yield prefix + name, item
            elif isinstance(item, h5py.Group):
                groups.append((f"{prefix}{name}/", item))


def _inside(file: Any, name: str) -> Any:
    """What is called ``name``, if the way there does not leave the file."""
    found, parts, num_links = file["/"], name.split("/"), 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if not isinstance(found, h5py.Group):
            raise KeyError(name)
        link = found.id.links.get_info(part.encode())
        if link.type == h5py.h5l.TYPE_HARD:
            found = found[part]
            continue
        num_links += 1
        if link.type != h5py.h5l.TYPE_SOFT or num_links > MAX_LINKS:
            raise Refusal(f"has a link to another file on the way to {name!r}{REFUSED}")
        target = found.id.links.get_val(part.encode()).decode()
        found = file["/"] if target.startswith("/") else found
        parts = [*target.split("/"), *parts]
    return found


def describe(path: str, name: str, external: bool = True) -> Answer:
    """All that is needed to read the dataset without the library.

    Unless ``external``, what takes data from another file is refused, and no other file is opened.
    """
    with h5py.File(path, "r") as file:
        dataset = _find(file, name, external)
        facts = _facts(dataset)
        layout = dataset.id.get_create_plist().get_layout()
        if layout == h5py.h5d.CHUNKED:
            return {**facts, "kind": "chunked"}, _chunks(dataset, file.userblock_size)
        if layout == h5py.h5d.CONTIGUOUS and not facts["is_external"]:
            return {**facts, "kind": "contiguous", "offset": dataset.id.get_offset()}, None
        kind = {h5py.h5d.COMPACT: "compact", h5py.h5d.VIRTUAL: "virtual"}.get(layout, "external")
        return {**facts, "kind": kind}, None


def attributes(path: str, wanted: list[str]) -> Answer:
    """The numbers that attributes hold: ``mass`` of the file, ``galaxy@mass`` of what is in it."""
    with h5py.File(path, "r") as file:
        return {"values": [_attribute(file, name) for name in wanted]}, None


def _attribute(file: Any, wanted: str) -> list[Any]:
    owner, _, name = wanted.rpartition("@")
    try:
        notes = _inside(file, owner).attrs
    except (KeyError, OSError, RuntimeError) as error:
        raise Refusal(
            f"has nothing called {owner!r}, whose attribute {name!r} is asked for"
        ) from error
    if name not in notes:
        raise Refusal(f"has no attribute {wanted!r}: it has {_listed(sorted(notes))}")
    values = np.asarray(notes[name])
    if values.dtype.kind not in "biuf" or values.size > MAX_VALUES or not np.isfinite(values).all():
        raise Refusal(f"has the attribute {wanted!r}, which is no finite number or a few of them")
    found: list[Any] = values.ravel().tolist()
    return found


def _find(file: Any, name: str, external: bool) -> Any:
    try:
        found = file[name] if external else _inside(file, name)
    except (KeyError, ValueError, OSError, RuntimeError) as error:
        raise Refusal(_missing(file, name, external)) from error
    if isinstance(found, h5py.Dataset):
        if not external:
            _check_own(found)
        return found
    inside = [known for known, _ in _walk(found, external)] if isinstance(found, h5py.Group) else []
    raise Refusal(f"has no dataset {name!r}: it is a group with {_listed(inside)}")


def _check_own(dataset: Any) -> None:
    """Raises if the data may lie in another file."""
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise Refusal(f"has {dataset.name!r} as a virtual dataset{REFUSED}")
    if plist.get_external_count():
        raise Refusal(f"has the data of {dataset.name!r} in other files{REFUSED}")


def _missing(file: Any, name: str, external: bool) -> str:
    try:
        link = file.get(name, getlink=True) if external else None
    except (KeyError, ValueError, OSError, RuntimeError):
        link = None
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = getattr(link, "filename", "") and f"{link.filename}, "
        return f"has {name!r} as a link to {target}{link.path!r}, which cannot be opened"
    known = [known for known, _ in _walk(file, external)]
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    if named_alike := [k for k in known if k.rpartition("/")[2] == name.rpartition("/")[2]]:
        near = named_alike
    return f"has no dataset {name!r}: it has {_listed(near or known)}"


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return ", ".join(map(repr, found[:MAX_LISTED])) + more if found else "none"


def _facts(dataset: Any) -> dict[str, Any]:
    plist = dataset.id.get_create_plist()
    dtype = _dtype(dataset)
    where = Path(os.fsdecode(dataset.file.filename)).absolute()
    sources = _external(plist, where) + _sources(plist, where)
    return {
        "status": _status(where),
        "shape": list(dataset.shape),
        "dtype": dtype.str,
        "is_plain": _is_plain(dataset),
        "fill": _fill(plist, dtype).tobytes().hex(),
        "chunk_shape": list(dataset.chunks or ()),
        "filters": [
            (code, list(values), label.decode(errors="replace"))
            for code, _, values, label in map(plist.get_filter, range(plist.get_nfilters()))
        ],
        "is_edge_unfiltered": _is_edge_unfiltered(plist),
        "stored_nbytes": dataset.id.get_storage_size(),
        "sources": [_status(source) for source in sources],
        "is_external": bool(plist.get_external_count()),
    }


def _status(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def _dtype(dataset: Any) -> np.dtype[Any]:
    if dataset.shape is None:
        raise Refusal(f"has no data in {dataset.name!r}: its dataspace is null")
    dtype: np.dtype[Any] = dataset.dtype
    if dtype.kind not in "biufc":
        raise Refusal(
            f"has elements of type {dtype} in {dataset.name!r}, and numbers were expected"
        )
    return dtype


def _is_plain(dataset: Any) -> bool:
    """Whether the bytes in the file are those of the NumPy dtype, and need no conversion."""
    return bool(h5py.h5t.py_create(dataset.dtype, logical=True) == dataset.id.get_type())


def _fill(plist: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    value = np.zeros((), dtype)
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED:
        plist.get_fill_value(value)
    return value


def _is_edge_unfiltered(plist: Any) -> bool:
    options = ctypes.c_uint()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        return False
    ctypes.CDLL(h5py.h5p.__file__).H5Pget_chunk_opts(
        ctypes.c_int64(plist.id), ctypes.byref(options)
    )
    return bool(options.value & DONT_FILTER_PARTIAL_CHUNKS)


def _chunks(dataset: Any, userblock_nbytes: int) -> NDArray[np.int64]:
    """A row a chunk: its first element, the mask of skipped filters, where it lies, its size."""
    rows: list[tuple[int, ...]] = []

    def keep(info: Any) -> None:
        rows.append((*info.chunk_offset, info.filter_mask, info.byte_offset, info.size))

    dataset.id.chunk_iter(keep)
    table = np.array(rows, np.int64).reshape(len(rows), dataset.ndim + 3)
    if rows and userblock_nbytes and not _is_at(dataset, table[0]):
        table[:, -2] += userblock_nbytes  # some versions of the library count from its end
        if not _is_at(dataset, table[0]):
            raise Refusal("has a user block, and its chunks are not found behind it")
    return table


def _is_at(dataset: Any, row: NDArray[np.int64]) -> bool:
    """Whether the chunk of ``row`` lies where the row says."""
    *_, offset, nbytes = row.tolist()
    _, expected = dataset.id.read_direct_chunk(tuple(row[:-3].tolist()))
    with Path(dataset.file.filename).open("rb") as file:
        file.seek(offset)
        return bool(file.read(nbytes) == expected)


def _external(plist: Any, path: Path) -> list[Path]:
    """The files that hold the data of an external dataset, each long enough."""
    pieces = [plist.get_external(i) for i in range(plist.get_external_count())]
    files = [Path(os.fsdecode(name)) for name, _, _ in pieces]
    if not all(file.exists() for file in files):  # from the working folder, as the library has it
        os.chdir(path.parent)  # or beside the file
    for file, (_, offset, nbytes) in zip(files, pieces, strict=True):
        if not file.exists():
            raise Refusal(f"has its data in {file}, which does not exist")
        size = file.stat().st_size
        is_limited = nbytes < 2**63  # the last piece may be as long as it likes
        if is_limited and size < offset + nbytes:
            raise Refusal(
                f"has its data in {file}, which is truncated: it has {size} bytes, and "
                f"{offset + nbytes} are needed"
            )
    return [file.absolute() for file in files]


def _sources(plist: Any, path: Path) -> list[Path]:
    """The files that a virtual dataset takes its data from.

    The library puts the fill value where one is missing. That is refused: it would go unnoticed.
    """
    if plist.get_layout() != h5py.h5d.VIRTUAL:
        return []
    parts = {
        (plist.get_virtual_filename(i), plist.get_virtual_dsetname(i))
        for i in range(plist.get_virtual_count())
    }
    # A name with % is a pattern, for as many as there are.
    return sorted({_source(path, *part) for part in parts if "%" not in "".join(part)})


def _source(path: Path, name: str, dataset: str) -> Path:
    places = [path] if name == "." else [path.parent / name, Path(name)]
    place = next(filter(Path.exists, places), None)
    if place is None:
        raise Refusal(f"is virtual and takes data from {name}, which does not exist")
    with h5py.File(place, "r") as source:
        if dataset not in source:
            raise Refusal(f"is virtual and takes data from {name}, which has no {dataset!r}")
    return place.absolute()


def read(path: str, name: str, box: list[list[int]], external: bool = True) -> Answer:
    """The bytes of ``box``, in this machine's order."""
    with contextlib.suppress(ImportError):
        import hdf5plugin  # noqa: F401 - for the filters that it brings
    with h5py.File(path, "r") as file:
        dataset = _find(file, name, external)
        _external(dataset.id.get_create_plist(), Path(path))
        part = dataset[tuple(slice(*span) for span in box)]
        return {}, np.asarray(part, dataset.dtype.newbyteorder("="))
