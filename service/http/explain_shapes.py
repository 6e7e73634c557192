"""The shapes of an explanation on the wire."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from radixkv.service.engine.lookups import Stopped
from radixkv.service.hints import Cause


class ResidentReply(TypedDict):
    """Resident tokens by tier. `host` is null, for no prompt is found there: host memory keeps what
    was preempted, and gives it back to the request that it was taken from, and to no other."""

    device: int
    host: int | None


class RegionReply(TypedDict):
    """A part of the prompt. `role_header` is what the template writes before a content."""

    kind: Literal["tools", "system", "message", "role_header", "generation_prompt", "prompt"]
    message: int | None
    role: str | None
    label: str


class DivergenceReply(TypedDict):
    """Where the prompt leaves what the caller's part of the cache has resident.

    `token` is the index of the first token that differs. The texts are short pieces: what both have
    before it, what this prompt has then, and what the cache has there.
    """

    token: int
    region: RegionReply
    shared_text: str
    this_text: str
    other_text: str


class HintReply(TypedDict):
    """A cause that the texts prove, and what to do about it."""

    cause: Cause
    message: str


class LookupReply(TypedDict):
    """One look-up of a request: of a choice at its admission, and after each preemption of it.

    `host_tokens` were copied back from host memory, where the preemption had put them. `stopped`
    says why no more was taken from the device's blocks.
    """

    choice: int
    resumed: bool
    identity: str
    queried_tokens: int
    device_tokens: int
    host_tokens: int
    stopped: Stopped


class ExplainRecord(TypedDict):
    """`prompt_tokens` = `resident_tokens` + the sum of `reasons`, always.

    Reasons: `first_seen`, `diverged`, `evicted`, `expired`, `adapter`, `template`, `tokenizer`,
    `execution`, `model`, `namespace`, `in_flight` (a running request computes these now),
    `below_block`, `last_token` (its logits are wanted), `no_room` (the pool is too small to use
    them), `disabled`. `identity` names the part of the cache that was looked at; `differs_in` the
    fields of it in which another part of the caller's own has more of this prompt. What another
    `cache_salt` has is told only to requests without one, and to an admin who asks
    `/v1/cache/explain`: salts keep a tenant's users apart.
    """

    prompt_tokens: int
    resident_tokens: int
    missing_tokens: int
    resident: ResidentReply
    reasons: dict[str, int]
    divergence: DivergenceReply | None
    hints: list[HintReply]
    identity: str
    differs_in: list[str]
    lookups: NotRequired[list[LookupReply]]


class ExplainReply(ExplainRecord):
    """What a request with this prompt, sent now, would find. `resident_tokens` is its
    `cached_tokens`."""

    object: Literal["cache.explanation"]
    model: str
    deterministic: bool
