"""The engine as a library: load a model, ask it things, look into its cache.

The public face of the engine thread; may be used from threads and from coroutines. Here it is built
and takes requests; how else it is asked and managed, managing.py and what that builds on say.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.adapters import Adapter, Adapters, read_settings
from radixkv.service.engine.building import (
    kv_dtype_of,
    model_of,
    runner_of,
    settings_of,
    step_tokens_of,
)
from radixkv.service.engine.cache_view import CacheView
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.choices import Choices
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.gate import Gate
from radixkv.service.engine.grammar_compile import Grammars, vocabulary_of
from radixkv.service.engine.keep import Keep
from radixkv.service.engine.keeping import Keeper
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.logprobs import PromptLogprobs
from radixkv.service.engine.managing import Managing
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.pin_view import PinView
from radixkv.service.engine.prompting import Prompting
from radixkv.service.engine.public_prompts import PublicPrompts, public
from radixkv.service.engine.request import Request
from radixkv.service.engine.request import Sequence as Choice
from radixkv.service.engine.sampling import Prompt
from radixkv.service.engine.stream import Stream
from radixkv.service.session import Session
from radixkv.service.session_hold import Holds
from radixkv.service.session_opening import open_session
from radixkv.service.session_text import Message
from radixkv.tokens import encode

log = logging.getLogger("radixkv.engine")


class Engine(Managing):
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
        adapters = read_settings(self.config.adapter)  # which may fail, so before the weights
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
        self._prompting = Prompting(
            self._model.tokenizer,
            self._model.vocab_size,
            tool_call_parser=self.config.tool_call_parser,
        )
        tool_format = self._prompting.tool_format
        self.token_text = TokenText(
            self._model.tokenizer, tool_format.special if tool_format is not None else ()
        )
        self.token_text.prepare()  # now, not under the first request
        self.grammars = Grammars(partial(vocabulary_of, self._model, self.token_text))
        self._make_choice = Choices(self._model, self.token_text)
        cache = PrefixCache(
            self._capacity.num_blocks,
            self.config.block_size,
            enabled=self.config.prefix_cache,
            force_miss=self.config.force_miss,
        )
        self._core = EngineCore(
            runner_of(self._model, self.config, self._capacity.num_blocks),
            cache,
            max_batch_tokens=step_tokens_of(self._model, self.config),
            max_num_seqs=self.config.max_num_seqs,
            lookahead_tokens=self.config.lookahead_tokens,
            share=self.config.prefix_cache and not self.config.force_miss,
            make_choice=self._make_choice,
            batch_share=self.config.batch_share,
            swap_memory=self.config.swap_memory,
        )
        self._keeper = Keeper(cache, self._capacity)
        self.pins = PinView(self._core, self._keeper)
        self._holds = Holds(self._core, self._keeper)
        self.cache = CacheView(self._core, self._identity)
        self.public = PublicPrompts(
            self._core,
            self._capacity,
            self._keeper,
            lambda: public(self._identity(LOCAL)),
            self._prompting.check_ids,
        )
        self._arrivals = itertools.count()
        self._gate = Gate(
            max_num_seqs=self.config.max_num_seqs,
            max_queue=self.config.max_queue,
            refused=self._core.note_refused,
        )
        self.adapters = Adapters(self._model)
        for name, where, given in adapters:
            self.adapters.put(name, where, given)
        self._core.start()

    # ---- asking ---------------------------------------------------------------------------------

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
        on_choice: Callable[[Choice], None] | None = None,
    ) -> Stream:
        """Queue a request; never blocks. ``param`` is the name that errors give the prompt.

        ``keeps`` are pinned once the prompt is computed; ``Stream.kept`` says what was granted.
        ``on_prompt`` is called then, on the engine thread, and all of the prompt can be found: the
        last part of a block too, which else is shared at the end. With ``keeps`` it is not called.
        ``on_choice`` is called with each choice at its end (``Request.on_choice``).
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
        spec = params.grammar
        grammar = None if spec is None else self.grammars.compiled(spec, origin.tenant)
        self._gate.enter(params.num_sequences, origin)
        try:
            stream = Stream(
                request_id or f"req-{uuid.uuid4().hex}",
                prompt_token_ids,
                params.n,
                deterministic=self.config.deterministic,
                abort=self._core.abort,
                done=lambda _: self._gate.leave(origin, params.num_sequences),
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
                grammar=grammar,
            )
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = PromptLogprobs(
                    request.prompt_ids, params.prompt_logprobs, self.token_text
                )
            if keeps:
                request.on_prompt = partial(self._keeper.prompt_computed, keeps)
            elif on_prompt is not None:
                request.on_prompt = partial(_share_prompt, on_prompt)
            request.on_choice = on_choice
            request.first_choice = self._make_choice(request, 0)  # refuses bad ids here and now
            self._core.submit(request)
        except BaseException:
            self._gate.leave(origin, params.num_sequences)
            raise
        return stream

    def session(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        tools: Sequence[Message] | None = None,
        template: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        ttl_s: float | None = 3600.0,
        budget_blocks: int | None = None,
        **sampling: Any,
    ) -> Session:
        """Begin a conversation that can fork and go back, and whose KV stays resident (Session).

        It begins with ``system`` and then ``messages``, if given; the template is given ``tools``
        and ``template_kwargs`` each time. ``template=False`` writes nothing between what is sent
        and what is answered, for models without a template. ``sampling`` are fields of
        SamplingParams, for each send that does not say otherwise, and of Origin (``tenant``,
        ``salt``, ``adapter``...). What the session stands on is held until nobody sent for
        ``ttl_s`` seconds (None: until it is closed), ``budget_blocks`` of it at most. Computes
        nothing yet. Raises InvalidRequest.
        """
        return open_session(
            self,
            self._holds,
            system=system,
            messages=messages,
            tools=tools,
            template=template,
            template_kwargs=template_kwargs,
            ttl_s=ttl_s,
            budget_blocks=budget_blocks,
            sampling=sampling,
        )

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


def _share_prompt(then: Callable[[], None], first: Choice) -> None:
    """Let others find the whole prompt, whose KV is there, and say so."""
    first.publish(tail=True)
    then()
