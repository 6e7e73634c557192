"""Turns a GGUF file into a safetensors directory, once; knows files and locks, nothing of serving.

    <cache>/gguf/<digest of the file>-v<version>/     config, weights in bf16, tokenizer, template
    <cache>/gguf/<digest>-v<version>.lock             held while it is made
    <cache>/gguf/.<digest>-v<version>.<random>/       being made; left behind only by a crash

A directory gets its final name in one rename when it is complete, so one that exists is whole.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from filelock import FileLock, Timeout

from radixkv.errors import InvalidConfig, UnsupportedModel

_VERSION = 1
"""Changes when the same GGUF file is converted to something else than before."""
_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Pre-tokenizers that split every digit off before anything else.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
# Tokens that end an answer, whichever of them the file calls "eos".
_END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
    "</s>",
)  # fmt: skip


def convert_gguf(
    source: Path, cache_dir: Path, *, progress: Callable[[str], None] | None = None
) -> Path:
    """Return the directory that holds ``source`` as safetensors, making it if need be.

    Takes half a minute for a small model the first time, and a read of the file afterwards. Two
    processes may call it at once: one works, the other waits. Raises InvalidConfig when the file
    is not a GGUF file, UnsupportedModel when transformers cannot read its kind of model.
    """
    say = progress or (lambda _: None)
    metadata = read_metadata(source)
    key = f"{_digest(source)}-v{_VERSION}"
    home = cache_dir / "gguf"
    home.mkdir(parents=True, exist_ok=True)
    target = home / key
    if target.is_dir():
        return target
    lock = FileLock(home / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is converting {source.name}; waiting for it")
        lock.acquire()
    try:
        if target.is_dir():
            return target
        for left_behind in home.glob(f".{key}.*"):
            shutil.rmtree(left_behind)
        work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=home))
        try:
            _convert(source, work, metadata, say)
            work.chmod(0o755)
            work.rename(target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return target
    finally:
        lock.release()


def _convert(
    source: Path, work: Path, metadata: dict[str, Any], say: Callable[[str], None]
) -> None:
    megabytes = source.stat().st_size / 1e6
    say(f"converting {source.name} ({megabytes:.0f} MB) to safetensors, this once")
    import torch  # seconds of silence belong after the line above
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Alone in a folder, so that no neighbour's config or tokenizer takes part.
    alone = work / "source"
    alone.mkdir()
    (alone / source.name).symlink_to(source.resolve())
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        say("  1/3 reading the weights")
        loader: Any = AutoModelForCausalLM
        model, info = loader.from_pretrained(
            alone,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **where,
        )
        if info["missing_keys"]:  # transformers would go on with random numbers
            raise ValueError(
                f"the weights {', '.join(sorted(info['missing_keys'])[:3])} are missing"
            )
        say("  2/3 reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(alone, **where)
    except Exception as e:  # a file of foreign contents fails anywhere, with anything
        kind = metadata.get("general.architecture", "unknown")
        raise UnsupportedModel(
            f"{source} holds a model of architecture {kind!r}, which transformers cannot read "
            f"from GGUF: {e}"
        ) from e
    shutil.rmtree(alone)
    _mend_tokenizer(tokenizer, metadata)
    _name_end_tokens(model, tokenizer)
    say("  3/3 writing safetensors")
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)


def _mend_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Split digits as the model was trained to, which transformers' reader leaves out."""
    if metadata.get("tokenizer.ggml.pre") not in _SINGLE_DIGITS:
        return
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def _name_end_tokens(model: Any, tokenizer: Any) -> None:
    """Write every token that ends an answer into the generation config: a file names only one."""
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    ids = [tokenizer.convert_tokens_to_ids(t) for t in _END_TOKENS if t in special]
    if tokenizer.eos_token_id is not None:
        ids.insert(0, tokenizer.eos_token_id)
    if ids:
        model.generation_config.eos_token_id = list(dict.fromkeys(ids))


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the scalar and string entries of a GGUF file's header; arrays are skipped.

    Raises InvalidConfig, naming the file, when it is not a GGUF file or ends too soon.
    """
    try:
        with path.open("rb") as f:
            if f.read(4) != _MAGIC:
                raise InvalidConfig(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            version, _, num_entries = struct.unpack("<IQQ", f.read(20))
            if version not in (2, 3):
                raise InvalidConfig(f"{path} is GGUF version {version}; read here: 2 and 3")
            found = {}
            for _ in range(num_entries):
                name = _string(f)
                value = _value(f, _number(f, "<I"))
                if value is not None:
                    found[name] = value
            return found
    except (struct.error, UnicodeDecodeError, KeyError) as e:
        raise InvalidConfig(f"{path} is damaged: its GGUF header cannot be read ({e})") from e


def _value(f: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(f)
    if kind != _ARRAY:
        return _number(f, _SCALARS[kind])
    item, count = _number(f, "<I"), _number(f, "<Q")
    if item == _STRING:
        for _ in range(count):
            f.seek(_number(f, "<Q"), 1)
    elif item == _ARRAY:
        for _ in range(count):
            _value(f, _ARRAY)
    else:
        f.seek(struct.calcsize(_SCALARS[item]) * count, 1)
    return None


def _number(f: BinaryIO, form: str) -> Any:
    return struct.unpack(form, f.read(struct.calcsize(form)))[0]


def _string(f: BinaryIO) -> str:
    return f.read(_number(f, "<Q")).decode()


def _digest(path: Path) -> str:
    """Return 128 bits of xxh3 of a file's contents, at the speed of the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        while piece := f.read(2**24):
            digest.update(piece)
    return digest.hexdigest()
