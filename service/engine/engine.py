"""The engine as a library: load a model, ask it things, look into its cache.

The public face of the engine thread; may be used from threads and from coroutines.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.errors import EngineDead, InvalidRequest, Overloaded
from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.adapters import Adapter, Adapters, split_setting
from radixkv.service.engine.boundaries import Cut, render_cut
from radixkv.service.engine.building import kv_dtype_of, model_of, runner_of, settings_of
from radixkv.service.engine.cache_view import CacheView
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.counters import EngineStats
from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.fairness import DEFAULT_SHARE, TenantShare
from radixkv.service.engine.keep import Keep, Kept
from radixkv.service.engine.keeping import Keeper
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.logprobs import PromptLogprobs
from radixkv.service.engine.origin import LOCAL, Origin, take_origin
from radixkv.service.engine.params import Generation, SamplingParams, sampling_params
from radixkv.service.engine.pin_view import PinView
from radixkv.service.engine.prompting import Prompting
from radixkv.service.engine.public_prompts import PublicPrompts, chat_prefix, public
from radixkv.service.engine.request import Request, encode
from radixkv.service.engine.request import Sequence as Choice
from radixkv.service.engine.runner import ModelRunner
from radixkv.service.engine.sampling import ChoiceSampler, Prompt
from radixkv.service.engine.stopping import ChoiceStream
from radixkv.service.engine.stream import Stream

log = logging.getLogger("radixkv.engine")


class Engine:
    """A model, its paged KV pool and its prefix cache, served by one thread.

    >>> with Engine("smollm2", kv_memory="512MiB") as engine:            # doctest: +SKIP
    ...     print(engine.chat([{"role": "user", "content": "Hello!"}], temperature=0).text)

    ``model`` is ``smollm2`` (the default), a directory, a hub name, a .gguf file, or a LoadedModel.
    ``settings`` are fields of EngineConfig; ``path`` is where ``model`` lies, if that was found out
    already (``resolve_model``). Raises InvalidConfig, NotFound or UnsupportedModel.
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        *,
        config: EngineConfig | None = None,
        path: Path | None = None,
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        self.config = settings_of(model, config, settings)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        self._model = model_of(model, self.config, path, progress)
        (progress or log.info)(f"runs {self.decoder_in_words}")
        self._capacity = Capacity.plan(
            kv_memory=self.config.kv_memory,
            bytes_per_block=self.bytes_per_block,
            block_size=self.config.block_size,
            model_len=self._model.max_model_len,
            max_model_len=self.config.max_model_len,
            pin_budget=self.config.pin_budget,
        )
        self.created = int(time.time())
        self.token_text = TokenText(self._model.tokenizer)
        self.token_text.prepare()  # now, not under the first request
        self._prompting = Prompting(self._model.tokenizer, self._model.vocab_size)
        cache = PrefixCache(
            self._capacity.num_blocks,
            self.config.block_size,
            enabled=self.config.prefix_cache,
            force_miss=self.config.force_miss,
        )
        self._core = EngineCore(
            runner_of(self._model, self.config, self._capacity.num_blocks),
            cache,
            max_batch_tokens=self.config.max_batch_tokens,
            max_num_seqs=self.config.max_num_seqs,
            lookahead_tokens=self.config.lookahead_tokens,
            share=self.config.prefix_cache and not self.config.force_miss,
            make_choice=self._make_choice,
            batch_share=self.config.batch_share,
            swap_memory=self.config.swap_memory,
        )
        self._keeper = Keeper(cache, self._capacity)
        self.pins = PinView(self._core, self._keeper)
        self.cache = CacheView(self._core, self._identity)
        self.public = PublicPrompts(
            self._core,
            self._capacity,
            self._keeper,
            lambda: public(self._identity(LOCAL)),
            self._prompting.check_ids,
        )
        self._arrivals = itertools.count()
        self._changed = threading.Condition()
        self._in_flight = 0  # choices of requests that are not finished
        self._in_flight_of: Counter[str] = Counter()  # the same by tenant
        self._shares: dict[str, TenantShare] = {}
        self._draining = False
        self.adapters = Adapters(self._model)
        for setting in self.config.adapter:
            self.adapters.load(*split_setting(setting))
        self._core.start()

    # ---- what is served -------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model.name

    @property
    def model_path(self) -> Path | None:
        """The directory the weights came from; None for a model built in memory."""
        return self._model.path

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that a request may have."""
        return self._capacity.max_model_len

    @property
    def bytes_per_block(self) -> int:
        """What a KV block takes of the device's memory."""
        return ModelRunner.bytes_per_block(
            self._model, self.config.block_size, kv_dtype_of(self.config)
        )

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.vocab_size

    @property
    def dtype(self) -> str:
        """The dtype that is computed in."""
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The device that computes."""
        return str(self._model.device)

    @property
    def decoder(self) -> Literal["native", "generic"]:
        """What runs the model: ``native``, the compiled decoder, or ``generic``, transformers."""
        return "generic" if self._model.decoder is None else "native"

    @property
    def decoder_in_words(self) -> str:
        """What runs the model, and if it is not the compiled decoder, why."""
        if self._model.decoder is not None:
            kept = " and keeps every bit, whatever is cached" if self.config.deterministic else ""
            return f"the compiled decoder{kept}"
        return f"transformers' layers, not the compiled decoder: {self._model.generic_reason}"

    @property
    def alive(self) -> bool:
        """Whether the engine thread still makes steps."""
        return self._core.alive

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, if something did."""
        return self._core.failure

    # ---- text and tokens ------------------------------------------------------------------------

    @property
    def prompting(self) -> Prompting:
        """What turns chats and text into tokens, and shows how."""
        return self._prompting

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Turn a chat into token ids with the model's template; raises InvalidRequest."""
        return self._prompting.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )

    def render_cut(
        self, messages: Sequence[Mapping[str, Any]], cuts: Sequence[Cut], **rendering: Any
    ) -> tuple[list[int], list[int]]:
        """Render a chat, and count the tokens that come before each of ``cuts`` (boundaries.py)."""
        return render_cut(self._prompting, messages, cuts, **rendering)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids."""
        return self._prompting.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens included."""
        self._prompting.check_ids(token_ids, "tokens")
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text)

    # ---- asking ---------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Complete ``prompt`` (text or token ids) and wait for it.

        ``sampling`` are fields of SamplingParams and of Origin: ``salt="x"`` keeps to a part of the
        cache that is private.
        """
        return self._start(prompt, sampling).result()

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Generation:
        """Answer a chat and wait for it; ``sampling`` as in ``generate``."""
        return self._start(self.render(messages), sampling, param="messages").result()

    async def agenerate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Complete ``prompt`` without blocking the event loop; cancelling it aborts the request."""
        return await self._start(prompt, sampling).aresult()

    async def achat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Generation:
        """Answer a chat without blocking the event loop."""
        return await self._start(self.render(messages), sampling, param="messages").aresult()

    def stream_generate(self, prompt: str | Sequence[int], **sampling: Any) -> Stream:
        """Complete ``prompt`` bit by bit: iterate the result with ``for`` or ``async for``."""
        return self._start(prompt, sampling)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Stream:
        """Answer a chat bit by bit: iterate the result with ``for`` or ``async for``."""
        return self._start(self.render(messages), sampling, param="messages")

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

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        origin: Origin = LOCAL,
        param: str = "prompt",
        keeps: Sequence[Keep] = (),
        explain: bool = False,
        on_prompt: Callable[[], None] | None = None,
    ) -> Stream:
        """Queue a request; never blocks. ``param`` is the name that errors give the prompt.

        ``keeps`` are pinned once the prompt is computed; ``Stream.kept`` says what was granted.
        ``on_prompt`` is called then, on the engine thread, and all of the prompt can be found: the
        last part of a block too, which else is shared at the end. With ``keeps`` it is not called.
        ``explain``: say in ``Stream.explained`` why not all of the prompt was cached.
        Raises InvalidRequest, ContextTooLong, NeverFits, AdapterNotFound, Overloaded or EngineDead,
        and then nothing is queued.
        """
        self._prompting.check_ids(prompt_token_ids, param)
        # Not `list(accounts)`, which brings their numbers up to date: the engine thread's affair.
        accounts = list(self._core.cache.accounts.by_tenant.values())
        kept = sum(a.floor for a in accounts if a.tenant != origin.namespace.tenant)
        max_tokens = self._capacity.max_tokens(
            len(prompt_token_ids), params, param=param, kept_blocks=kept
        )
        adapter = self.adapters.find(origin.adapter)
        self._enter(params.n, origin.tenant)
        try:
            stream = Stream(
                request_id or f"req-{uuid.uuid4().hex}",
                prompt_token_ids,
                params.n,
                deterministic=self.config.deterministic,
                abort=self._core.abort,
                done=partial(self._leave, origin.tenant),
            )
            stream.explain = explain
            request = Request(
                id=stream.request_id,
                arrival=next(self._arrivals),
                prompt_ids=stream.prompt_token_ids,
                prompt_bytes=encode(prompt_token_ids),
                identify=partial(self._identity_under, origin, adapter),
                params=params,
                max_tokens=max_tokens,
                entropy=secrets.randbits(64),
                sampling_prompt=Prompt(stream.prompt_token_ids),
                stream=stream,
                origin=origin,
                adapter=adapter,
            )
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = PromptLogprobs(
                    request.prompt_ids, params.prompt_logprobs, self.token_text
                )
            if keeps:
                request.on_prompt = partial(self._keeper.prompt_computed, keeps)
            elif on_prompt is not None:
                request.on_prompt = partial(_share_prompt, on_prompt)
            request.first_choice = self._make_choice(request, 0)  # refuses bad ids here and now
            self._core.submit(request)
        except BaseException:
            self._leave(origin.tenant, params.n)
            raise
        return stream

    # ---- looking in, changing, ending -----------------------------------------------------------

    def stats(self) -> EngineStats:
        """Read the counters as of the last step; never waits."""
        return self._core.stats

    def check(self) -> list[str]:
        """Prove the accounting, between two steps: broken invariants in words, [] when sound."""

        return self._core.call(self._core.check).result()

    def warm_up(self) -> None:
        """Pay for buffers and threads now, before anybody asks: leaves no blocks and no counts.

        For a fresh engine: it forgets the cache and begins the counters again.
        """
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
        with self._changed:
            self._shares[tenant] = share
        self._core.set_tenant(tenant, share)

    def set_cache_shares(self, shares: Mapping[str, tuple[int | None, int]]) -> Future[None]:
        """Set (quota, floor) in blocks of the cache for each tenant named, all at once; does not
        wait. The future raises InvalidConfig if the floors exceed the pool beside those of others.
        """

        def set_all() -> None:
            for tenant in shares:  # or a floor that grows would meet one that is yet to shrink
                self._core.cache.set_share(tenant)
            for tenant, (quota, floor) in shares.items():
                self._core.cache.set_share(tenant, quota=quota, floor=floor)

        return self._core.call(set_all)

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
        self._draining = True
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._in_flight and self.alive:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
        return self._in_flight == 0

    def close(self) -> None:
        """End the engine thread; what still runs gets an EngineDead. Idempotent."""
        self._draining = True
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _identity(self, origin: Origin) -> CacheIdentity:
        return self._identity_under(origin, self.adapters.find(origin.adapter))

    def _identity_under(self, origin: Origin, adapter: Adapter | None) -> CacheIdentity:
        return self._model.identity(
            origin.namespace,
            self.config.block_size,
            deterministic=self.config.deterministic,
            kv_dtype=kv_dtype_of(self.config),
            adapter=None if adapter is None else adapter.digest,
        )

    def _make_choice(self, request: Request, index: int) -> tuple[ChoiceSampler, ChoiceStream]:
        if index == 0 and request.first_choice is not None:
            return request.first_choice
        eos = self._model.eos_token_ids
        sampler = ChoiceSampler(
            request.params,
            index=index,
            prompt_ids=request.sampling_prompt,
            vocab_size=self.vocab_size,
            eos_token_ids=eos,
            entropy=request.entropy,
        )
        output = ChoiceStream(
            index,
            request.params,
            self.token_text,
            eos_token_ids=eos,
            max_tokens=request.max_tokens,
        )
        return sampler, output

    def _start(
        self, prompt: str | Sequence[int], sampling: dict[str, Any], param: str = "prompt"
    ) -> Stream:
        origin = take_origin(sampling)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self.submit(ids, sampling_params(sampling), origin=origin, param=param)

    def _enter(self, num_choices: int, tenant: str) -> None:
        limit = self.config.max_num_seqs + self.config.max_queue
        with self._changed:
            if self._draining:
                raise EngineDead("the engine is shutting down")
            if self._in_flight and self._in_flight + num_choices > limit:
                self._core.counters.rejected += 1
                raise Overloaded(
                    f"{self._in_flight} choices run or wait, and {limit} may; try again later",
                    retry_after_s=1,
                )
            share, mine = self._shares.get(tenant, DEFAULT_SHARE), self._in_flight_of[tenant]
            if mine and share.max_waiting is not None:
                running = share.max_running or self.config.max_num_seqs
                if mine + num_choices > running + share.max_waiting:
                    self._core.counters.rejected += 1
                    raise Overloaded(
                        f"your limits are max_running {running} and max_waiting "
                        f"{share.max_waiting}: {mine} choices run or wait; try again later",
                        retry_after_s=1,
                    )
            self._in_flight += num_choices
            self._in_flight_of[tenant] += num_choices

    def _leave(self, tenant: str, num_choices: int) -> None:
        with self._changed:
            self._in_flight -= num_choices
            self._in_flight_of[tenant] -= num_choices
            if not self._in_flight_of[tenant]:
                del self._in_flight_of[tenant]
            self._changed.notify_all()


def _share_prompt(then: Callable[[], None], first: Choice) -> None:
    """Let others find the whole prompt, whose KV is there, and say so."""
    first.publish(tail=True)
    then()
