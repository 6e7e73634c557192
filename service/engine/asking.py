"""The ways to ask an engine: text or chat; waiting, awaiting, or reading along.

All of them come down to ``submit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.service.engine.keep import Keep, Kept
from radixkv.service.engine.origin import LOCAL, Origin, take_origin
from radixkv.service.engine.params import Generation, SamplingParams, sampling_params
from radixkv.service.engine.served import Served
from radixkv.service.engine.stream import Stream


class Asking(Served, ABC):
    """What an Engine can be asked, in the caller's words."""

    @abstractmethod
    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        origin: Origin = LOCAL,
        param: str = "prompt",
        keeps: Sequence[Keep] = (),
    ) -> Stream:
        """Queue a request; never blocks."""

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Complete ``prompt`` (text or token ids) and wait for it.

        ``sampling`` are fields of SamplingParams and of Origin: ``salt="x"`` keeps to a part of the
        cache that is private.
        """
        return self._start(prompt, sampling).result()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answer a chat and wait for it; ``sampling`` as in ``generate``.

        ``tools``, in OpenAI's shape, are shown to the model as they are; ``prompting.read_answer``
        tells the text of what it says from its calls.
        """
        return self._start(self.render(messages, tools=tools), sampling, "messages").result()

    async def agenerate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Complete ``prompt`` without blocking the event loop; cancelling it aborts the request."""
        await self._compile_beside(sampling)
        return await self._start(prompt, sampling).aresult()

    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answer a chat without blocking the event loop."""
        await self._compile_beside(sampling)
        return await self._start(self.render(messages, tools=tools), sampling, "messages").aresult()

    def stream_generate(self, prompt: str | Sequence[int], **sampling: Any) -> Stream:
        """Complete ``prompt`` bit by bit: iterate the result with ``for`` or ``async for``."""
        return self._start(prompt, sampling)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Answer a chat bit by bit: iterate the result with ``for`` or ``async for``."""
        return self._start(self.render(messages, tools=tools), sampling, "messages")

    def pin(
        self,
        prompt: str | Sequence[int],
        *,
        ttl_s: float | None = None,
        name: str | None = None,
        **origin: Any,
    ) -> Kept:
        """Compute ``prompt``, as far as it is not resident, and pin it; wait for that.

        It stays until it was not used for ``ttl_s`` seconds; None: until it is unpinned
        (``engine.pins``). ``origin`` are fields of Origin. The answer says how much was granted.
        """
        asked_by = take_origin(origin)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        params = sampling_params({"max_tokens": 1, "temperature": 0.0} | origin)
        keep = Keep(len(ids), ttl_s, name)
        return self.submit(ids, params, origin=asked_by, keeps=[keep]).result().kept[0]

    async def _compile_beside(self, sampling: Mapping[str, Any]) -> None:
        """Compile the grammar of ``sampling``, if it has one, while the event loop goes on."""
        asked = dict(sampling)
        tenant, spec = take_origin(asked).tenant, sampling_params(asked).grammar
        if spec is not None:
            await self.grammars.compile_beside(spec, tenant)

    def _start(
        self, prompt: str | Sequence[int], sampling: dict[str, Any], param: str = "prompt"
    ) -> Stream:
        origin = take_origin(sampling)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.submit(ids, sampling_params(sampling), origin=origin, param=param)
