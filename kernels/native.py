"""Compiles the CPU kernels in ``csrc`` with the machine's own C compiler and loads them.

Knows compilers, files and ctypes; nothing of attention. The library is built once per source,
compiler command and processor, kept in the user's cache folder, and shared by all processes.
Where there is no compiler the torch backend does the same work, more slowly.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-w",
]
COMPILE_TIMEOUT_S = 300  # for one source; a few seconds unless the machine is very busy


class NativeUnavailable(ImportError):
    """The CPU kernels cannot be compiled or loaded here; the message says why."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the compiled kernels, compiling them first if they are not kept yet (about 10 s).

    Raises NativeUnavailable; the answer, good or bad, is given once per process.
    """
    try:
        library = ctypes.CDLL(str(build(default_folder())))
        library.radixkv_attend.restype = None
        library.radixkv_attend_scratch.restype = ctypes.c_int64
        library.radixkv_check_tables.restype = ctypes.c_int64
        library.radixkv_write.restype = ctypes.c_int64
        library.radixkv_linear.restype = None
        return library
    except (OSError, AttributeError) as e:
        raise NativeUnavailable(f"the compiled CPU kernels cannot be loaded: {e}") from e


@functools.cache
def unavailable_reason() -> str | None:
    """Say why there are no compiled CPU kernels here; None where there are."""
    try:
        load_library()
    except NativeUnavailable as e:
        return str(e)
    return None


def cache_folder() -> Path:
    """The user's cache folder for all that radixkv keeps; it may not be there, or be read-only."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "radixkv"


def default_folder() -> Path:
    """Where compiled kernels are kept: the user's cache folder, or a private one if that fails."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="radixkv-kernels-"))


def build(folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Compile the kernels into ``folder`` unless that was done before; return the library.

    Atomic: a reader never sees half a file, and two processes that build at once both succeed.
    """
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C compiler found (looked for {', '.join(compilers)})")
    target = folder / f"cpu-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch, "library.so")
        sources = sorted(SOURCES.glob("*.c"))
        objects = [str(Path(scratch, source.stem + ".o")) for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            for done in [
                workers.submit(_compile, [compiler, *FLAGS, "-c", str(source), "-o", made])
                for source, made in zip(sources, objects, strict=True)
            ]:
                done.result()
        _compile([compiler, "-shared", *FLAGS, *objects, "-o", str(library), "-lm"])
        os.replace(library, target)
    return target


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(f"{command[0]} could not be run: {e}") from e
    if result.returncode:
        raise NativeUnavailable(f"{command[0]} failed: {result.stderr.strip()[-500:]}")


def _fingerprint(compiler: str) -> str:
    """Name what the library depends on: -march=native means this very kind of processor."""
    digest = hashlib.blake2b(digest_size=10)
    for part in (compiler, *FLAGS, platform.machine(), *processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def processor() -> list[str]:
    """Name the processor's model and instruction sets as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features"))]
