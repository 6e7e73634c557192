"""Turn what an answer must look like into a matcher over a model's tokens, once for all who ask.

Knows llguidance and its limits; nothing of logits. A compilation takes milliseconds, at worst a
second or two, most of it while other Python threads run; it belongs on no thread that others wait
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.engine.grammar_source import source_of
from radixkv.service.engine.grammar_state import GrammarState, allowed_bits, in_brief
from radixkv.service.engine.grammar_turns import TenantTurns
from radixkv.service.engine.grammar_vocab import Vocabulary
from radixkv.service.engine.token_text import TokenText

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel

MAX_KEPT = 256
MAX_KEPT_CHARS = 2 * 1024 * 1024
"""Of all sources together: what is compiled from them is about a hundred times as large."""
T = TypeVar("T")
_STARTING = threading.Lock()
_STACK_BYTES = 256 * 1024 * 1024
"""llguidance follows references by recursion: a chain of as many as fit into a schema's text takes
some 50 MiB, and where a stack ends the process does. What is not touched takes no memory."""


def _limits(max_items_in_row: int) -> LLParserLimits:
    """Of one step's mask 10 ms or so, for others wait for it; of one choice's memory 40 MB."""
    return LLParserLimits(
        max_items_in_row=max_items_in_row,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=30_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar over a model's tokens. Any thread may start a choice in it."""

    vocabulary: Vocabulary
    _matcher: LLMatcher
    """At the start; only ever copied."""

    def start(
        self, *, put_off: np.ndarray, min_tokens: int = 0, ignore_eos: bool = False
    ) -> GrammarState:
        """Return a choice's state before its first token: some microseconds.

        ``put_off`` are tokens that do not come in the first ``min_tokens`` where another may; with
        ``ignore_eos`` the ends of a sequence at no time.
        """
        ends = self.vocabulary.eos if ignore_eos else ()
        early = put_off if min_tokens else ()
        ids = {*map(int, ends), *map(int, early)}
        return GrammarState(
            self._matcher.deep_copy(),
            self.vocabulary,
            avoid=self.vocabulary.bits(ids) if ids else None,
            avoid_until=None if ignore_eos else min_tokens,
        )


class Grammars:
    """The compiled grammars of one model: the latest used are kept, within bounds.

    What a tenant had compiled only that tenant finds again, so nobody can tell by time what others
    ask for. Any thread may ask; who asks for what is being compiled waits for it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """``vocabulary`` is called once, when it is first needed or by ``prepare``."""
        self._build = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._building = threading.Lock()
        self._lock = threading.Lock()
        # A refusal is kept as well, as its words: an error is one caller's own.
        self._kept: OrderedDict[tuple[str, GrammarSpec], Future[Grammar | str]] = OrderedDict()
        self._kept_chars = 0
        self._turns: TenantTurns[Grammar | str] = TenantTurns("radixkv-grammar")

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens; raises InvalidRequest if they are no pieces of text."""
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = self._build()
            return self._vocabulary

    def prepare(self) -> None:
        """Build the tables of the model's tokens now, if it has such tokens."""
        with contextlib.suppress(InvalidRequest):
            _ = self.vocabulary

    def is_kept(self, spec: GrammarSpec, tenant: str) -> bool:
        """Whether ``compiled`` would return at once."""
        with self._lock:
            found = self._kept.get((tenant, spec))
            return found is not None and found.done()

    def compiled(self, spec: GrammarSpec, tenant: str) -> Grammar:
        """Return the grammar for ``spec``; raises InvalidRequest with llguidance's own words."""
        return _or_refusal(self._compiled(spec, tenant))

    def _compiled(self, spec: GrammarSpec, tenant: str) -> Grammar | str:
        key = (tenant, spec)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                mine = self._kept[key] = Future()
                self._kept_chars += len(spec.source)
                self._drop_oldest()
            else:
                self._kept.move_to_end(key)
        if found is None:
            found = mine
            try:
                vocabulary = self.vocabulary
                mine.set_result(_on_deep_stack(lambda: compile_grammar(spec, vocabulary)))
            except InvalidRequest as refusal:
                mine.set_result(str(refusal))
            except BaseException as error:  # whoever waits must be told, whatever it is
                mine.set_exception(error)
        return found.result()

    async def compile_beside(self, spec: GrammarSpec, tenant: str, param: str = "grammar") -> None:
        """Have ``spec`` compiled in a thread, so that ``compiled`` has it at once.

        A few threads at most, whoever asks, and each tenant in its turn: a stream of hostile
        schemas takes no more of the machine, and no other tenant waits behind it. Raises
        InvalidRequest that names ``param``, and Overloaded if too many of the tenant's wait.
        """
        compiled = partial(self._compiled, spec, tenant)
        if self.is_kept(spec, tenant):
            _or_refusal(compiled(), param)
        else:
            _or_refusal(
                await asyncio.wrap_future(self._turns.submit(tenant, spec, compiled)), param
            )

    def _drop_oldest(self) -> None:
        """Forget the oldest of whoever takes most: nobody's go for what others have compiled."""
        while len(self._kept) > MAX_KEPT or (
            self._kept_chars > MAX_KEPT_CHARS and len(self._kept) > 1
        ):
            taken: Counter[str] = Counter()
            for tenant, spec in self._kept:
                taken[tenant] += len(spec.source) + MAX_KEPT_CHARS // MAX_KEPT
            most = max(taken, key=taken.__getitem__)
            oldest = next(key for key in self._kept if key[0] == most)
            del self._kept[oldest]
            self._kept_chars -= len(oldest[1].source)


def _or_refusal(compiled: Grammar | str, param: str = "grammar") -> Grammar:
    if isinstance(compiled, str):
        raise InvalidRequest(compiled, param=param)
    return compiled


def _on_deep_stack(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread whose stack is deep, and wait for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    with _STARTING:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="radixkv-grammar-deep", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def vocabulary_of(model: LoadedModel, token_text: TokenText) -> Vocabulary:
    """Build the tables of a model's tokens; raises InvalidRequest if they are no pieces of text."""
    return Vocabulary(
        model.tokenizer,
        token_text,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_threads=torch.get_num_threads(),
    )


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
    """Compile ``spec``; raises InvalidRequest if it is none, is too large, or allows no text."""
    # A client's own rules can be ambiguous without bounds; those of a schema, or of a list of
    # members that may all be left out, are many at most.
    limits = _limits(400 if spec.kind == "lark" else 2000)
    matcher = LLMatcher(vocabulary.tokens, source_of(spec), log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(f"{spec.kind}: {in_brief(matcher.get_error())}")
    _probe(spec, matcher.deep_copy(), vocabulary)
    return Grammar(vocabulary, matcher)


def _probe(spec: GrammarSpec, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Refuse what llguidance accepts and fails at with the first or the second token."""
    state = GrammarState(matcher, vocabulary)
    for _ in range(2):
        (allowed,) = allowed_bits([state])
        if state.error is not None:
            raise InvalidRequest(f"{spec.kind}: {state.error}")
        tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        going_on = np.setdiff1d(tokens, vocabulary.eos)
        if matcher.is_stopped() and not matcher.is_accepting() or not len(tokens):
            raise InvalidRequest(f"{spec.kind}: no text can look like that")
        if not len(going_on) or matcher.is_stopped():
            return
        state.take(int(going_on[0]))
        if state.error is not None:
            raise InvalidRequest(f"{spec.kind}: {state.error}")
