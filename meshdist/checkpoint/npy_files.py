"""Files of NumPy's format npy, one for each array."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from urllib.parse import quote

import numpy as np

from meshdist.checkpoint.manifest import UNREADABLE, StoredArray
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.safetensors_files import FilePlan
from meshdist.checkpoint.stored_types import dtype_of, in_numpy

# File systems take names of 255 bytes.
MOST_NAME_BYTES = 200


def file_name(name: str) -> str:
    """Return a name for the file of an array; the manifest has that of the array."""
    quoted = quote(name, safe=" ")
    if len(quoted) > MOST_NAME_BYTES or quoted.startswith("."):
        quoted = quoted.lstrip(".")[:MOST_NAME_BYTES] + "-" + hashlib.sha256(name.encode()).hexdigest()[:16]
    return quoted


def lay_out(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[list[FilePlan], dict[str, StoredArray]]:
    """Return a file for each of the arrays, of these shapes and dtypes."""
    files, stored = [], {}
    for name, (shape, dtype) in arrays.items():
        in_file = np.dtype(in_numpy(dtype).name).newbyteorder("<")
        header = io.BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(in_file), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        begin = header.tell()
        stored[name] = StoredArray(shape, dtype, f"{file_name(name)}.npy", begin)
        nbytes = math.prod(shape) * dtype_of(dtype).itemsize
        files.append(FilePlan(stored[name].file, header.getvalue(), begin + nbytes))
    return files, stored


def check_header(path: Path, stored: StoredArray) -> None:
    """Raise CheckpointError where the header of a file does not say what the manifest says."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, in_fortran_order, dtype = reader(file)
            begin = file.tell()
    except (*UNREADABLE, EOFError, MemoryError, SyntaxError, TokenError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from None
    expected = np.dtype(in_numpy(stored.dtype).name).newbyteorder("<")
    if (shape, in_fortran_order, dtype, begin) != (stored.shape, False, expected, stored.offset):
        raise CheckpointError(
            f"{path} is damaged: its header says {dtype} of shape {shape}, which differs from the manifest"
        )
