"""What the handlers share: the engine once it is loaded, its metrics, the requests in flight.

Knows how to bring a prompt to the engine without holding up the event loop; nothing of JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from radixkv.errors import ContextTooLong, InvalidRequest, Overloaded, RadixKVError
from radixkv.service.engine.keep import Keep
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.http.auth import Gate, caller_of
from radixkv.service.http.errors import Loading, ShuttingDown
from radixkv.service.http.marks import Mark
from radixkv.service.http.messages import Message
from radixkv.service.http.model_ids import ModelIds
from radixkv.service.http.observe import line_of
from radixkv.service.http.schema import Prompt
from radixkv.service.metrics import Metrics
from radixkv.service.tenant_shares import Shares

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.stream import Stream

T = TypeVar("T")
PING_S = 15.0
# About 5 ms of tokenizing; what is longer goes to a thread, so that no stream stutters for it.
_INLINE_CHARS = 16 * 1024
_MESSAGE_CHARS = 64
"""What a message costs beside its text, in characters of text."""


class Aborted(RadixKVError):
    """The server gave up a request that its client still wanted."""

    status = 503
    code = "aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted, because the server is shutting down.")


class Busy(Overloaded):
    """The server takes no more for now, whoever fills it."""

    def __init__(self) -> None:
        super().__init__("The server is busy; try again later.", retry_after_s=1)


class Serving:
    """Lives as long as the server; used on the event loop only.

    Each request in flight is in ``active`` from its submission to its end, so that stopping can
    wait for it or end it.
    """

    def __init__(
        self,
        *,
        ping_s: float = PING_S,
        vllm_metric_names: bool = False,
        inspect_text: bool = False,
        gate: Gate | None = None,
        adapter_dir: Path | None = None,
        batch_dir: Path | None = None,
    ) -> None:
        """``gate`` lets callers in; without one everybody who gets here is the local tenant.

        ``inspect_text``: admins may read what all tenants have cached. ``adapter_dir``: where
        admins may load adapters from; None: nowhere. ``batch_dir``: where files and batches are
        kept; None: there are none.
        """
        self.models = ModelIds(self)
        self.adapter_dir = adapter_dir
        self.batch_dir = batch_dir
        self.on_start: list[Callable[[], None]] = []
        """Called on the event loop when there is an engine."""
        self.ping_s = ping_s
        self.inspect_text = inspect_text
        self.gate = gate or Gate()
        self.metrics = Metrics(vllm_names=vllm_metric_names, by_tenant=self.gate.keyed)
        self.draining = False
        self.active: set[Stream] = set()
        self._engine: Engine | None = None
        self._longest_token = 1
        self._one_ended = asyncio.Event()
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="radixkv-tokenize")

    @property
    def engine(self) -> Engine:
        """The engine; raises Loading before there is one."""
        if self._engine is None:
            raise Loading
        return self._engine

    def start(self, engine: Engine) -> None:
        """Begin to serve with ``engine``, which stays the caller's to close.

        Raises InvalidConfig if the tenants were promised more of the cache than there is.
        """
        if self.gate.keyed:
            self.gate.attach(
                Shares(engine).use,
                max_running=engine.config.max_num_seqs,
                max_choices=engine.config.max_num_seqs + engine.config.max_queue,
            )
        self._engine = engine
        self._longest_token = max(map(len, engine.tokenizer.get_vocab()))
        self.metrics.attach(engine)
        for begin in self.on_start:
            begin()

    def stop(self) -> None:
        """Let go of the threads."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless ``name`` is served; no name means the model."""
        self.models.adapter_of(name)

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Refuse a list of prompts that the queue could never take whole: waiting would not help.

        A single prompt is taken whatever its ``n``, once nothing else is in flight.
        """
        config = self.engine.config
        limit = max(n, config.max_num_seqs + config.max_queue)
        if num_prompts * n > limit:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; at most {limit} "
                "may run or wait on this server",
                param="prompt",
            )

    def check_length(self, prompt: str | Sequence[int], param: str) -> None:
        """Raise ContextTooLong for a prompt that cannot fit, before much time is spent on it.

        Text is at least its length by the longest token's: megabytes would else be tokenized, for
        seconds, only to be refused.
        """
        limit, least = self.engine.max_model_len, len(prompt)
        if isinstance(prompt, str):
            least = -(-len(prompt) // self._longest_token)
        if least > limit:
            raise ContextTooLong(limit=limit, prompt_tokens=least, max_tokens=None, param=param)

    async def tokenize(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Turn texts into token ids; what is token ids already stays."""

        def work() -> list[list[int]]:
            tokenize = self.engine.tokenize
            return [
                tokenize(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        return await self._run(sum(len(p) for p in prompts if isinstance(p, str)), work)

    async def render(self, messages: Sequence[Message], rendering: dict[str, Any]) -> list[int]:
        """Turn a chat into token ids."""
        shown = [message.for_template() for message in messages]
        size = _size(shown, rendering)
        return await self._run(size, partial(self.engine.render, shown, **rendering))

    async def render_marked(
        self, messages: Sequence[Message], rendering: dict[str, Any], marks: Sequence[Mark]
    ) -> tuple[list[int], tuple[Keep, ...]]:
        """Turn a chat into token ids, and its breakpoints into what of them is to stay resident."""
        shown = [message.for_template() for message in messages]
        size = _size(shown, rendering)
        cuts = [mark.cut for mark in marks]
        ids, positions = await self._run(
            size * (1 + len(cuts)), partial(self.engine.render_cut, shown, cuts, **rendering)
        )
        keeps = [Keep(at, mark.ttl_s) for at, mark in zip(positions, marks, strict=True)]
        return ids, tuple(keeps)

    async def compile_grammar(
        self, request: web.Request, params: SamplingParams, param: str
    ) -> None:
        """Compile the grammar of ``params``, if there is one, before anything is queued: a bad one
        is the InvalidRequest of the field ``param``. In a thread, unless that was done before."""
        if params.grammar is not None:
            tenant = caller_of(request).tenant
            await self.engine.grammars.compile_beside(params.grammar, tenant, param)

    async def detokenize(self, prompts: Sequence[Prompt]) -> list[str]:
        """Turn token ids into texts; what is text already stays."""

        def work() -> list[str]:
            detokenize = self.engine.detokenize
            return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in prompts]

        return await self._run(4 * sum(len(p) for p in prompts if isinstance(p, list)), work)

    def admit(self, request: web.Request, prompts: Sequence[Sequence[int]], n: int) -> None:
        """Charge the caller for several prompts at once, all or nothing; raises LimitReached.

        ``submit`` does it for a single prompt, and does not charge again for these.
        """
        limits = caller_of(request).limits
        if limits is not None:
            limits.admit(sum(map(len, prompts)), len(prompts) * n)
            line_of(request).paid.extend(map(len, prompts))

    def submit(
        self,
        request: web.Request,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        origin: Origin,
        param: str,
        keeps: Sequence[Keep] = (),
        explain: bool = False,
    ) -> Stream:
        """Queue one prompt; raises what ``Engine.submit`` raises. To be used inside ``running``."""
        if self.draining:
            raise ShuttingDown
        line, caller = line_of(request), caller_of(request)
        if not line.paid:
            self.admit(request, [token_ids], params.num_sequences)
        if line.paid:  # and not where nobody pays
            line.paid.popleft()
        try:
            stream = self.engine.submit(
                token_ids,
                params,
                request_id=request_id,
                origin=origin,
                param=param,
                keeps=keeps,
                explain=explain,
            )
        except BaseException as e:
            if caller.limits is not None:
                caller.limits.give_back(len(token_ids))
                if isinstance(e, Overloaded):  # how full it is would tell what others do
                    raise Busy from None
            raise
        if caller.limits is not None:
            caller.limits.enter(stream)
        self.active.add(stream)
        line.streams.append(stream)
        return stream

    @contextmanager
    def running(self, request: web.Request) -> Iterator[None]:
        """End what ``request`` submitted, however the handler is left, and observe its times."""
        line, caller = line_of(request), caller_of(request)
        try:
            yield
        finally:
            for stream in line.streams:
                self.active.discard(stream)
                if caller.limits is not None:
                    caller.limits.leave(stream)
                    if self.metrics.tenants is not None:
                        self.metrics.tenants.count_usage(caller.tenant, stream.usage)
                if stream.finished:
                    self.metrics.observe(stream, line.started_s)
                stream.abort()
            if caller.limits is not None:  # what a list of prompts paid for and did not come to
                caller.limits.give_back(sum(line.paid))
                line.paid.clear()
            self._one_ended.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if that took too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.active:
            self._one_ended.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._one_ended.wait(), left)
            except TimeoutError:
                return False
        return True

    async def _run(self, size: int, function: Callable[[], T]) -> T:
        """Call ``function`` here if its input is small, else in a thread."""
        if size <= _INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)


def _size(shown: Sequence[Mapping[str, Any]], rendering: Mapping[str, Any]) -> int:
    """Estimate the characters of a rendered chat."""
    size = sum(_MESSAGE_CHARS + len(message["content"]) for message in shown)
    for more in (rendering.get("tools"), *(m["tool_calls"] for m in shown if "tool_calls" in m)):
        size += len(str(more)) if more else 0
    return size


SERVING = web.AppKey("SERVING", Serving)
