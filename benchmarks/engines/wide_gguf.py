"""Write the weights of a quantised GGUF file to another one, in float16, for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

FLOAT16 = 1  # of general.file_type


def widen(source: Path, target: Path) -> None:
    """Copy a GGUF file; its matrices become float16, its vectors float32.

    Args:
        source: The file to read.
        target: The file to write.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = FLOAT16 if name == "general.file_type" else field.contents()
        _add(writer, name, field, value)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        shape = tuple(int(size) for size in reversed(tensor.shape))
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(tensor.name, numbers.reshape(shape).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, field: Any, value: Any) -> None:
    """Copy one field of the header."""
    kind = field.types[0]
    if kind is GGUFValueType.ARRAY:
        writer.add_key_value(name, value, kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(name, value, kind)
