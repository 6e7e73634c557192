"""A request and its choices as the scheduler sees them: tokens, blocks, age; no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.service.engine.params import Choice, SamplingParams
from radixkv.service.engine.shares import Account
from radixkv.table import BlockTable

if TYPE_CHECKING:
    from radixkv.service.engine.adapters import Adapter
    from radixkv.service.engine.beams_group import BeamGroup
    from radixkv.service.engine.grammar_compile import Grammar
    from radixkv.service.engine.logprobs import PromptLogprobs
    from radixkv.service.engine.sampling import ChoiceSampler, Prompt
    from radixkv.service.engine.stopping import ChoiceStream
    from radixkv.service.engine.stream import Stream


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """KV of a preempted sequence in host memory: its tokens from a block on, one record a block."""

    first_block: int
    num_tokens: int
    """The sequence's first tokens, up to where it is saved."""
    records: Any
    num_bytes: int


@dataclass(slots=True, eq=False)
class Request:
    """What one caller asked for: a prompt, and choices or beams that share its blocks."""

    id: str
    arrival: int
    """Position in the order of arrival; preemption takes the latest first."""
    prompt_ids: tuple[int, ...]
    prompt_bytes: bytes
    identify: Callable[[], CacheIdentity]
    """Says under what its KV may be shared; the answer changes with the model's weights."""
    params: SamplingParams
    max_tokens: int
    """Tokens a choice may generate: what was asked, cut to what context and pool allow."""
    entropy: int
    """What unseeded choices draw from."""
    sampling_prompt: Prompt
    """The prompt as the samplers of all choices see it, digested once."""
    stream: Stream
    origin: Origin = LOCAL
    """Who asks, and how urgently."""
    adapter: Adapter | None = None
    """What its name meant when it was submitted; it keeps that to its end."""
    grammar: Grammar | None = None
    """What ``params.grammar`` means for the model's tokens."""
    identity: CacheIdentity = field(init=False)
    """The answer for the weights that compute it; given by the engine thread."""
    account: Account = field(init=False)
    """What its tenant has and had; given by the engine thread."""
    prompt_logprobs: PromptLogprobs | None = None
    sequences: list[Sequence] = field(default_factory=list)
    """The choices that are not finished, or the beams awake; one until the prompt is computed, then
    ``params.num_sequences``."""
    forked: bool = False
    cached_tokens: int | None = None
    """What the cache gave at first admission (USAGE-3: never overwritten later)."""
    completion_tokens: int = 0
    first_choice: tuple[ChoiceSampler, ChoiceStream] | None = None
    """Sampler and output of choice 0, made early so that bad parameters are refused at once."""
    on_prompt: Callable[[Sequence], None] | None = None
    """Called on the engine thread, with the first choice, once the prompt's KV is there."""
    on_choice: Callable[[Sequence], None] | None = None
    """Called on the engine thread with each choice that has begun, when it has ended or was aborted
    and is recorded; what was computed of it is in the cache, and nothing was evicted since."""
    may_publish: bool = True
    """False once the weights changed under it: its KV belongs to no identity any more."""
    beams: BeamGroup | None = None
    """Its beam search, if it is one: then ``sequences`` are the beams that run."""
    drawn: list[tuple[Sequence, Choice]] = field(default_factory=list)
    """Choices that are finished, until it is known which of them are returned (``best_of``)."""

    @property
    def unborn(self) -> int:
        """Choices that will join the running ones when the first is computed."""
        return 0 if self.forked else self.params.num_sequences - 1

    @property
    def asleep(self) -> list[Sequence]:
        """Beams that hold nothing until the first of them, which waits or runs, is computed."""
        return [] if self.beams is None else self.beams.asleep

    @property
    def may_read_cache(self) -> bool:
        """Whether it may start from cached KV: prompt log-probabilities need every position."""
        return self.prompt_logprobs is None or self.prompt_logprobs.complete


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: prompt plus what was generated, and the table of blocks that holds their KV.

    ``tokens[0 : table.num_tokens]`` have their KV on the device. A step computes some of the rest;
    when it reaches the end it also draws the next token. So prefill, decode and the recomputation
    after a preemption are one and the same thing.
    """

    request: Request
    index: int
    sampler: ChoiceSampler
    output: ChoiceStream
    tokens: bytearray
    """Prompt and generated tokens, big-endian uint32."""
    ids: list[int]
    """The same tokens as numbers, for batches."""
    table: BlockTable | None = None
    high: int = 0
    """Most tokens whose KV it ever had; what is below and computed again was lost."""
    skipped: int = 0
    """How many sequences that came later were admitted before this one."""
    preemptions: int = 0
    total: float = 0.0
    """The sum of its tokens' log-probabilities, if choices are selected by that."""
    saved: Saved | None = None
    """What a preemption put into host memory and is not restored yet."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far, computed or not."""
        return len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed, given its table."""
        assert self.table is not None, "a waiting sequence has no table"
        return len(self.ids) - self.table.num_tokens

    @property
    def key(self) -> bytes:
        """``tokens`` as the cache takes them."""
        request = self.request
        if len(self.ids) == len(request.prompt_ids):
            return request.prompt_bytes
        return bytes(self.tokens)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Age: requests by arrival, choices by index; batch work counts as the youngest."""
        return self.request.origin.batch, self.request.arrival, self.index

    @property
    def priority(self) -> int:
        """Lower is more urgent, inside its tenant."""
        return self.request.origin.priority

    @property
    def publishes_to(self) -> int:
        """Up to which token others are to find its blocks while it runs, if it is a beam.

        Only what it has computed before, for the beams that sleep and share it: what is new may be
        of no use to anybody in a step or two.
        """
        return max(self.high, len(self.request.prompt_ids))

    def takes_of(self, found_tokens: int, block_size: int) -> int:
        """Return how many of ``found_tokens`` that the cache has it may begin with: whole blocks
        where what was saved goes on from there, for that is copied in from a block's border on."""
        saved = self.saved
        if saved is not None and saved.first_block * block_size <= found_tokens < saved.num_tokens:
            return found_tokens - found_tokens % block_size
        return found_tokens

    @property
    def tokens_to_come(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens + len(self.request.prompt_ids) - len(self.ids)

    def append(self, token_id: int) -> None:
        """Add a drawn token."""
        self.ids.append(token_id)
        self.tokens += token_id.to_bytes(4, "big")

    def publish(self, *, tail: bool = False) -> None:
        """Let others find what is computed so far."""
        if self.table is not None and self.request.may_publish:
            self.table.publish(bytes(self.tokens), tail=tail)
