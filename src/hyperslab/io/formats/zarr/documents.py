"""The JSON documents of a Zarr hierarchy, and the arrays that they tell of."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import DataFile, explained
from hyperslab.io.formats.npy import NAME

MAX_NBYTES = 256 * 2**20
"""Of a document; those of large hierarchies, consolidated in one, are some megabytes."""
MAX_DEPTH = 64

Json = dict[str, Any]


@dataclass(frozen=True)
class Node:
    """An array or a group."""

    directory: Path
    version: int
    is_array: bool
    file: DataFile
    metadata: Json
    """As it is in the file."""


def find_node(directory: Path) -> Node | None:
    """The array or group whose files lie in ``directory``, or None."""
    for name, version in (("zarr.json", 3), (".zarray", 2), (".zgroup", 2)):
        with explained(directory / name):
            is_there = (directory / name).exists()
        if is_there:
            file = DataFile.look_at(directory / name)
            metadata = read_document(file)
            _check_version(metadata, version, file)
            is_array = _is_array(metadata, file) if version == 3 else name == ".zarray"
            return Node(directory, version, is_array, file, metadata)
    return None


def find_array(root: Path, name: str) -> Node:
    """The array called ``name`` in the hierarchy at ``root``."""
    _check_directory(root)
    parts = [part for part in name.split("/") if part]
    node = None if ".." in parts else find_node(root.joinpath(*parts))
    if node is None and name == NAME:
        node = find_node(root)
    if node is None or not node.is_array:
        raise FormatError(f"{root} has no array {name!r}; it has {array_names(root)}")
    return node


def array_names(root: Path) -> list[str]:
    """The arrays at and below ``root``; one that is there itself is called ``data``."""
    _check_directory(root)
    node = find_node(root)
    if node is None:
        raise FormatError(
            f"{root} is not a Zarr hierarchy: there is no zarr.json, .zgroup or .zarray in it"
        )
    if node.is_array:
        return [NAME]
    consolidated = _consolidated(node)
    return sorted(_walk(node, "", set()) if consolidated is None else consolidated)


def _check_directory(root: Path) -> None:
    with explained(root):
        if not stat.S_ISDIR(root.stat().st_mode):
            raise FormatError(
                f"{root} is a file, and the directory of a Zarr hierarchy was expected (if it is "
                "zipped, unpack it first)"
            )


def read_document(file: DataFile) -> Json:
    if file.size > MAX_NBYTES:
        raise FormatError(f"{file.path} is too large for Zarr metadata: {file.size} bytes")
    try:
        found = json.loads(bytes(file.read(0, file.size)))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file.path} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise FormatError(f"{file.path} is damaged: it is not a JSON object")
    return found


def _check_version(metadata: Json, version: int, file: DataFile) -> None:
    if metadata.get("zarr_format") != version:
        raise FormatError(
            f"{file.path} is damaged: it says zarr_format {metadata.get('zarr_format')!r}, and "
            f"{version} was expected"
        )


def _is_array(metadata: Json, file: DataFile) -> bool:
    kind = metadata.get("node_type")
    if kind not in ("array", "group"):
        raise FormatError(f"{file.path} is damaged: it says node_type {kind!r}")
    return bool(kind == "array")


def _consolidated(group: Node) -> list[str] | None:
    """The names in the metadata of the whole hierarchy, where that is collected in its root."""
    if group.version == 3:
        nodes = _entries(group.metadata.get("consolidated_metadata"))
        return (
            None
            if nodes is None
            else [
                name
                for name, node in nodes.items()
                if isinstance(node, dict) and node.get("node_type") == "array"
            ]
        )
    path = group.directory / ".zmetadata"
    nodes = _entries(read_document(DataFile.look_at(path))) if path.exists() else None
    ends = "/.zarray"
    return None if nodes is None else [key[: -len(ends)] for key in nodes if key.endswith(ends)]


def _entries(document: object) -> Json | None:
    found = document.get("metadata") if isinstance(document, dict) else None
    return found if isinstance(found, dict) else None


def _walk(group: Node, prefix: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """The arrays below ``group``; directories of arrays, which hold chunks, are not looked into."""
    with explained(group.directory):
        status = group.directory.stat()
        if (status.st_dev, status.st_ino) in seen or len(prefix.split("/")) > MAX_DEPTH:
            return  # a link back
        seen.add((status.st_dev, status.st_ino))
        children = sorted(entry for entry in group.directory.iterdir() if entry.is_dir())
    for child in children:
        node = find_node(child)
        if node is not None and node.is_array:
            yield prefix + child.name
        elif node is not None:
            yield from _walk(node, f"{prefix}{child.name}/", seen)
