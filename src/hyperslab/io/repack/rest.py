"""What an HDF5 file holds beside the arrays that are rewritten."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

COPY_NBYTES = 16 << 20


def copy_rest(source: Any, target: Any, rewritten: Collection[str]) -> list[str]:
    """Copies groups, datasets, links and attributes of one ``h5py.File`` to another, unchanged.

    All but ``rewritten``, of which only the attributes are. Links to other files lead to where they
    led. Data that lies in other files is written into this one. Says what was left out: what refers
    to other objects.
    """
    return _Copier(source, target, {name.strip("/") for name in rewritten}).run()


class _Copier:
    def __init__(self, source: Any, target: Any, rewritten: set[str]) -> None:
        self._source, self._target, self._rewritten = source, target, rewritten
        self._left_out: list[str] = []
        self._places: dict[int, str] = {}
        """Where an object of the source, by its address, is in the target."""

    def run(self) -> list[str]:
        for name in self._rewritten:
            if self._is_own(self._source[name]):
                self._places[_address(self._source[name])] = name
            self._copy_attributes(self._source[name], self._target[name])
        self._copy_group("")
        return self._left_out

    def _copy_group(self, path: str) -> None:
        group = self._source[path] if path else self._source
        self._places[_address(group)] = path or "/"
        self._copy_attributes(group, self._target.require_group(path or "/"))
        for name in group:
            inner = f"{path}/{name}" if path else name
            if inner not in self._rewritten:
                self._copy_link(inner, group.get(name, getlink=True))

    def _copy_link(self, path: str, link: Any) -> None:
        import h5py

        if isinstance(link, h5py.SoftLink):
            self._target[path] = h5py.SoftLink(link.path)
        elif isinstance(link, h5py.ExternalLink):
            beside = Path(self._source.filename).resolve().parent
            self._target[path] = h5py.ExternalLink(beside / link.filename, link.path)
        else:
            self._copy_object(path)

    def _copy_object(self, path: str) -> None:
        import h5py

        found = self._source[path]
        if (place := self._places.get(_address(found))) is not None:
            self._target[path] = self._target[place]
        elif isinstance(found, h5py.Group):
            self._copy_group(path)
        else:
            self._places[_address(found)] = path
            if isinstance(found, h5py.Dataset) and _refers(found.dtype):
                self._left_out.append(f"references in {found.name}")
            elif isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
                self._write_out(found, path)
            else:
                self._source.copy(found, self._target, path, without_attrs=True)
                self._copy_attributes(found, self._target[path])

    def _write_out(self, found: Any, path: str) -> None:
        new = self._target.create_dataset(path, found.shape, found.dtype)
        row = max(1, found.nbytes // max(1, len(found)))
        step = max(1, COPY_NBYTES // row)
        for start in range(0, len(found), step):
            new[start : start + step] = found[start : start + step]
        self._copy_attributes(found, new)

    def _copy_attributes(self, found: Any, new: Any) -> None:
        for name in found.attrs:
            if _refers(found.attrs.get_id(name).dtype):
                self._left_out.append(f"attribute {name!r} of {found.name}")
            else:
                new.attrs[name] = found.attrs[name]

    def _is_own(self, found: Any) -> bool:
        return bool(found.file.filename == self._source.filename)


def _refers(kind: Any) -> bool:
    """Whether its elements lead to places in the file, which are others in a new one."""
    import h5py

    if kind.names:  # dimension scales, as netCDF has, refer in records
        return any(_refers(kind[name]) for name in kind.names)
    return h5py.check_ref_dtype(h5py.check_vlen_dtype(kind) or kind) is not None


def _address(found: Any) -> int:
    import h5py

    return int(h5py.h5o.get_info(found.id).addr)
