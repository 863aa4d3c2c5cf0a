"""All that is said of targets that lie beside samples, and how it is put beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset, joined
from hyperslab.io.opening import open_target
from hyperslab.io.pairing import BY_ROW, is_table
from hyperslab.io.tables import Columns, Table, attributes, table

ATTRIBUTES = "attributes"
"""What the vector of the files' attributes is called."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What lies beside samples, as settings and options name it."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """Files by the name of their array: patterns, or a table (``.csv``)."""
    pair_by: str | None = None
    columns: Columns | None = None
    """Of the table, those with the numbers."""
    key: str | None = None
    """Its column that names samples."""
    attributes: Sequence[str] | str = ()
    """Of the samples' own HDF5 files."""

    def __post_init__(self) -> None:
        tables = [name for name, pattern in self.beside.items() if is_table(pattern)]
        if not tables and (self.columns is not None or self.key is not None):
            raise ConfigError(
                "columns and key say what a table holds, but nothing that lies beside the samples "
                "is one: name it, as in y = 'targets.csv'"
            )

    def put_beside(
        self,
        data: Dataset,
        axes: Mapping[str, str] | None = None,
        *,
        external: bool = True,
        setting: str = "by",
    ) -> Dataset:
        """``data`` with all of it; ``axes`` are those of arrays by name.

        The user knows ``pair_by`` as ``setting``.
        """
        for name, pattern in self.beside.items():
            other: Dataset | Table
            if is_table(pattern):
                other = table(pattern, self.columns, self.key)
            else:
                rows, letters = self.pair_by == BY_ROW, (axes or {}).get(name)
                other = open_target(pattern, data.spec, letters, rows=rows, external=external)
            data = joined(data, {name: other}, self.pair_by, setting=setting)
        if names := [self.attributes] if isinstance(self.attributes, str) else self.attributes:
            data = joined(data, {ATTRIBUTES: attributes(*names)}, None)
        return data
