"""What an engine's owner does beside asking: watch, warm up, share out, change weights, end.

Knows what has to happen between two steps, and asks the engine thread for it; nothing of how
requests are made.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from radixkv.errors import InvalidRequest
from radixkv.service.engine.adapters import Adapter, Adapters
from radixkv.service.engine.beams_asking import BeamAsking
from radixkv.service.engine.counters import EngineStats
from radixkv.service.engine.gate import Gate
from radixkv.service.engine.public_prompts import PublicPrompts, chat_prefix
from radixkv.service.engine.shares import TenantShare


class Managing(BeamAsking, ABC):
    """What an Engine can be asked, and how it is managed while it runs."""

    adapters: Adapters
    public: PublicPrompts
    _gate: Gate

    def stats(self) -> EngineStats:
        """Read the counters as of the last step; never waits."""
        return self._core.stats

    def adapters_asked(self) -> tuple[set[str], set[str]]:
        """Names of the adapters that requests run with now, and wait for; never waits."""
        running: set[str] = set()
        waiting: set[str] = set()
        for request in self._core.in_flight():
            if request.origin.adapter is not None:
                names = waiting if request.stream.admitted_s is None else running
                names.add(request.origin.adapter)
        return running, waiting

    def check(self) -> list[str]:
        """Prove the accounting, between two steps: broken invariants in words, [] when sound."""
        return self._core.call(self._core.check).result()

    def warm_up(self) -> None:
        """Pay for buffers and threads now, before anybody asks: leaves no blocks and no counts.

        For a fresh engine: it forgets the cache and begins the counters again.
        """
        self.grammars.prepare()
        length = min(32, self.max_model_len - 2)
        if length < 1:
            return
        self.generate([0] * length, max_tokens=2, ignore_eos=True, temperature=0.0, salt="warm-up")

        def forget() -> None:
            self._core.cache.reset()
            self._core.clear_counters()

        self._core.call(forget).result()

    def share_system_prompts(self, texts: Sequence[str]) -> None:
        """Let all tenants share each of these system prompts, and compute them now; leaves no
        counts. Raises InvalidRequest where the template or the pool has no room for one."""
        for text in texts:
            ids = chat_prefix(self.render, [{"role": "system", "content": text}])
            self.public.declare(ids)
            self.generate(ids, max_tokens=1, ignore_eos=True, temperature=0.0, salt="public")
        self._core.call(self._core.clear_counters).result()

    def set_tenant_share(self, tenant: str, share: TenantShare) -> None:
        """Give ``tenant`` (``Origin.tenant``) a weight and limits, for what is submitted from now
        on and for what waits. Never blocks; takes effect within one step."""
        self._gate.set_share(tenant, share)
        self._core.set_tenant(tenant, share)

    def set_cache_shares(self, shares: Mapping[str | None, tuple[int | None, int]]) -> Future[None]:
        """Set (quota, floor) in blocks of the cache for each tenant named, all at once; does not
        wait. The future raises InvalidConfig if the floors exceed the pool beside those of others.
        """

        return self._core.call(lambda: self._core.cache.set_shares(shares))

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights in place, between two steps; cached KV of the old ones is not used again.

        Running requests go on with the KV they have (ADMIN-2) and publish nothing more. The new
        identity follows from the new weights' contents, so going back finds the old blocks again.
        Raises InvalidRequest if a name or shape does not fit; then nothing has changed.
        """

        def swap() -> None:
            state = self._model.model.state_dict()
            for name, tensor in weights.items():
                if name not in state or state[name].shape != tensor.shape:
                    wanted = tuple(state[name].shape) if name in state else "no such weight"
                    raise InvalidRequest(
                        f"weight {name!r} has shape {tuple(tensor.shape)}; wanted {wanted}"
                    )
            with torch.no_grad():
                for name, tensor in weights.items():
                    state[name].copy_(tensor)
            self._model.weights_changed()
            self._core.weights_changed()

        self._core.call(swap).result()

    def load_adapter(self, name: str, path: Path | str, *, scale: float = 1.0) -> Adapter:
        """Load a LoRA adapter from a directory of PEFT, to be asked for as ``adapter=name``.

        ``scale`` multiplies its own. One that had the name is replaced; requests that run or wait
        under it end as they began (ADMIN-2). Raises NotFound or InvalidAdapter, with the reason.
        """
        return self.adapters.load(name, path, scale=scale)

    def unload_adapter(self, name: str) -> Adapter:
        """Serve an adapter no more; running requests keep it. Raises AdapterNotFound."""
        return self.adapters.unload(name)

    def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the rest; True if all ended in time."""
        self._gate.close()
        return self._gate.wait_until_empty(timeout_s, unless=lambda: not self.alive)

    def close(self) -> None:
        """End the engine thread; what still runs gets an EngineDead. Idempotent."""
        self._gate.close()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
