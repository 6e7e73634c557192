"""The adapters that are loaded: each fitted to the model, under a name that may be given anew.

Knows modules, factors and names; nothing of blocks, requests or HTTP. A name is only how a request
finds an adapter: what it computes is told apart by ``digest`` alone, and whoever holds an Adapter
keeps what it was, whatever becomes of the name.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from radixkv.errors import AdapterNotFound, InvalidAdapter
from radixkv.kernels.native_adapters import PARTS, Factors, NativeAdapter, pack_adapter
from radixkv.kernels.native_adapters import AdapterRun as NativeRun
from radixkv.service.engine.peft import LowRank, PeftAdapter, read_peft

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel

T = TypeVar("T")
_PATH = re.compile(
    r"(?:.+\.)?layers\.(?P<layer>\d+)\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>(?:gate|up|down)_proj))"
)
"""Linear layers that see each row of a step exactly once, in the step's order."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory, fitted to one model; it never changes."""

    name: str
    digest: str
    """Of its weights and scale: what a cache identity says of it."""
    rank: int
    """The greatest rank of its products."""
    path: Path | None
    """Where it was read from."""
    created: int
    """When it was loaded, in seconds since 1970."""
    native: NativeAdapter | None
    """What the compiled decoder applies; None where transformers runs the model."""
    factors: Mapping[str, Factors]
    """What is applied to transformers' layers, by path, on their device and in their dtype; empty
    where the compiled decoder runs the model."""


class AdapterRun(NamedTuple):
    """Consecutive rows of a step that are under one adapter."""

    adapter: Adapter
    start: int
    stop: int


class Adapters:
    """Adapters by name; any thread may ask and load."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._loading = threading.Lock()
        self._by_name: dict[str, Adapter] = {}  # replaced whole, never changed

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of that name, None for no name; raises AdapterNotFound."""
        if name is None:
            return None
        found = self._by_name.get(name)
        if found is None:
            raise AdapterNotFound(name)
        return found

    def all(self) -> tuple[Adapter, ...]:
        """Return what is loaded, in the order of first loading."""
        return tuple(self._by_name.values())

    def load(
        self, name: str, path: Path | str, *, scale: float = 1.0, replace: bool = True
    ) -> Adapter:
        """Read an adapter and give it ``name``, in the place of one that had it.

        Raises NotFound or InvalidAdapter, and then what was loaded stays as it was; so it does if
        the name is taken and ``replace`` is False.
        """
        check_name(name)
        with self._loading:
            if not replace and name in self._by_name:
                raise InvalidAdapter(f"the adapter {name!r} is loaded already", param="lora_name")
            return self._put(name, Path(path), read_peft(path, scale=scale))

    def put(self, name: str, path: Path, given: PeftAdapter) -> Adapter:
        """As ``load``, of an adapter that was read from ``path``."""
        with self._loading:
            return self._put(name, path, given)

    def _put(self, name: str, path: Path, given: PeftAdapter) -> Adapter:
        adapter = fit(given, self._loaded, name=name, path=path)
        self._by_name = self._by_name | {name: adapter}
        return adapter

    def unload(self, name: str) -> Adapter:
        """Take a name away; requests that run keep the adapter. Raises AdapterNotFound."""
        with self._loading:
            found = self.find(name)
            assert found is not None
            self._by_name = {n: a for n, a in self._by_name.items() if n != name}
        return found


def check_name(name: str) -> None:
    """Raise InvalidAdapter for what cannot be part of a model's id."""
    if not _NAME.fullmatch(name):
        raise InvalidAdapter(
            f"{name[:140]!r} cannot name an adapter; wanted 1 to 128 of A-Z a-z 0-9 . _ - that "
            "begin with a letter or digit",
            param="lora_name",
        )


def split_setting(setting: str) -> tuple[str, Path]:
    """Read ``NAME=DIR``; raises InvalidAdapter."""
    name, equals, path = setting.partition("=")
    if not equals or not path:
        raise InvalidAdapter(f"adapter is {setting!r}; wanted NAME=DIR")
    check_name(name)
    return name, Path(path).expanduser()


def read_settings(settings: Iterable[str]) -> list[tuple[str, Path, PeftAdapter]]:
    """Read the adapters of ``NAME=DIR``s, before there is a model that they could be fitted to.

    Raises NotFound or InvalidAdapter.
    """
    named = [split_setting(setting) for setting in settings]
    return [(name, path, read_peft(path)) for name, path in named]


def fit(given: PeftAdapter, loaded: LoadedModel, *, name: str, path: Path | None = None) -> Adapter:
    """Check an adapter against the model and bring it into the form that the model's runner wants.

    Raises InvalidAdapter naming the layer at fault.
    """
    linears = _linears(loaded.model)
    _expect_targets(given, loaded.model, linears)
    for at, layer in given.layers.items():
        module = linears[at]
        wanted = (module.in_features, module.out_features)
        if (layer.a.shape[1], len(layer.b)) != wanted:
            raise InvalidAdapter(
                f"the adapter's weights of {at} are for {layer.a.shape[1]} inputs and "
                f"{len(layer.b)} outputs, and the model has {wanted[0]} and {wanted[1]}: it was "
                "made for another model"
            )
    decoder = loaded.decoder
    native = None
    factors: dict[str, Factors] = {}
    if decoder is not None:
        parts: list[dict[str, Factors]] = [{} for _ in decoder.weights.layers]
        for at, layer in given.layers.items():
            index, part = _place(at)
            parts[index][part] = _factors(layer, torch.float32, torch.device("cpu"))
        padded = decoder.weights.layers[0].down.in_features
        native = pack_adapter(parts, padded_features=padded)
    else:
        factors = {
            at: _factors(layer, loaded.dtype, loaded.device) for at, layer in given.layers.items()
        }
    now = int(time.time())
    return Adapter(name, given.digest, given.max_rank, path, now, native, factors)


def runs_of(adapters: Sequence[Adapter | None], lens: Iterable[int]) -> list[AdapterRun]:
    """Return the runs of rows of a step whose sequence s has ``lens[s]`` rows under adapters[s]."""
    found: list[AdapterRun] = []
    stop = 0
    for adapter, rows in zip(adapters, lens, strict=True):
        start, stop = stop, stop + int(rows)
        if adapter is None:
            continue
        if found and found[-1].adapter is adapter and found[-1].stop == start:
            start = found.pop().start
        found.append(AdapterRun(adapter, start, stop))
    return found


def native_runs(runs: Sequence[AdapterRun]) -> list[NativeRun]:
    """Return the same runs as the compiled decoder wants them."""
    found = []
    for adapter, start, stop in runs:
        if adapter.native is None:
            raise RuntimeError(f"the adapter {adapter.name!r} was fitted to transformers' layers")
        found.append(NativeRun(adapter.native, start, stop))
    return found


def by_adapter(works: list[T], adapter_of: Callable[[T], Adapter | None]) -> list[T]:
    """Bring what is under one adapter together, so that its weights are read once a step.

    Within an adapter the order stays, and where there is none all of it does.
    """
    seen: dict[int, int] = {}
    ranks = [seen.setdefault(id(adapter_of(work)), len(seen)) for work in works]
    if len(seen) < 2:
        return works
    return [work for _, work in sorted(zip(ranks, works, strict=True), key=lambda pair: pair[0])]


def _linears(model: Any) -> dict[str, nn.Linear]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and _PATH.fullmatch(path)
    }


def _place(path: str) -> tuple[int, str]:
    found = _PATH.fullmatch(path)
    assert found is not None
    part = found["attention"] or found["mlp"]
    assert part in PARTS
    return int(found["layer"]), part


def _expect_targets(given: PeftAdapter, model: Any, linears: Mapping[str, nn.Linear]) -> None:
    """The file must hold what its config means, and the model must have it."""
    for path in given.layers:
        if path not in linears:
            known = "q, k, v, o, gate, up and down projections"
            raise InvalidAdapter(
                f"the adapter changes {path}; served are the {known} of the model's layers, and it "
                "is none of them here"
            )
        if not given.targets(path):
            raise InvalidAdapter(f"the adapter has weights of {path}, which its config leaves out")
    lacking = [path for path in linears if given.targets(path) and path not in given.layers]
    if lacking:
        raise InvalidAdapter(
            f"the adapter's config means {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if lacking[1:] else "")
            + ", of which it has no weights"
        )


def _factors(layer: LowRank, dtype: torch.dtype, device: torch.device) -> Factors:
    with torch.inference_mode():
        a = layer.a.to(device, dtype).contiguous()
        b = (layer.b.float() * layer.scale).to(device, dtype).contiguous()
    return a, b
