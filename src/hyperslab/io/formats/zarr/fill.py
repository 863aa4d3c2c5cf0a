"""The values of chunks that were never written, in all their spellings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from hyperslab.errors import FormatError

_SPECIAL = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def fill_value(value: object, dtype: np.dtype[Any]) -> Any:
    """``value``, as JSON has it, as one of ``dtype``.

    >>> fill_value("-Infinity", np.dtype("f4")), fill_value("0x7fc00000", np.dtype("f4"))
    (np.float32(-inf), np.float32(nan))
    """
    native = dtype.newbyteorder("=")
    try:
        with np.errstate(over="raise"):
            return _parsed(value, native)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise FormatError(f"damaged: its fill value {value!r:.80} is no {dtype}") from error


def _parsed(value: object, dtype: np.dtype[Any]) -> Any:
    if value is None:  # anything would do
        return dtype.type(0)
    if isinstance(value, str):
        return _spelled(value, dtype)
    if isinstance(value, list):
        return _complex(value, dtype)
    if dtype.kind in "iub" and value != int(value):  # type: ignore[call-overload]
        raise ValueError
    if dtype.kind in "iu":
        return dtype.type(int(value))  # type: ignore[call-overload]
    if dtype.kind == "b" and value not in (0, 1):
        raise ValueError
    return dtype.type(value)


def _spelled(text: str, dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "fc" and text in _SPECIAL:
        return dtype.type(_SPECIAL[text])
    if dtype.kind == "f" and text.startswith("0x"):
        bits = int(text, 16).to_bytes(dtype.itemsize, "big")
        return np.frombuffer(bits, dtype.newbyteorder(">")).astype(dtype)[0]
    raw = base64.b64decode(text, validate=True)  # the bytes as stored, in some of version 2
    if len(raw) != dtype.itemsize:
        raise ValueError
    return np.frombuffer(raw, dtype)[0]


def _complex(parts: list[object], dtype: np.dtype[Any]) -> Any:
    if dtype.kind != "c" or len(parts) != 2:
        raise ValueError
    half = np.dtype(f"f{dtype.itemsize // 2}")
    real, imag = (_parsed(part, half) for part in parts)
    return np.array([real, imag], half).view(dtype)[0]
