"""Prompts that all tenants share: declared, kept resident, listed and withdrawn.

Knows tokens and the public part of the cache; nothing of who may declare one. What is declared is
not reserved: its blocks are those that its first user computes, and then nobody's work takes them,
since they are the public part's floor.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from radixkv.errors import InvalidRequest, NotFound
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.tokens import encode

if TYPE_CHECKING:
    from radixkv.public import PublicPrefix
    from radixkv.service.engine.capacity import Capacity
    from radixkv.service.engine.core import EngineCore
    from radixkv.service.engine.keeping import Keeper


@dataclass(frozen=True, slots=True)
class PublicPrompt:
    """One of them, as of a moment."""

    id: str
    name: str | None
    num_tokens: int
    num_blocks: int
    resident_tokens: int
    created_at: float
    """Unix time in seconds."""


class PublicPrompts:
    """Those of one engine. Everything waits for the end of a step."""

    kept_blocks = 0
    """What they keep resident; those that begin alike are counted for each. Anybody may read it."""

    def __init__(
        self,
        core: EngineCore,
        capacity: Capacity,
        keeper: Keeper,
        identity: Callable[[], CacheIdentity],
        check_ids: Callable[[Sequence[int], str], None],
    ) -> None:
        """``identity`` is that of the model in the public namespace, as of now; ``check_ids``
        raises InvalidRequest for what are no tokens of its."""
        self._core = core
        self._capacity = capacity
        self._keeper = keeper
        self._identity = identity
        self._check_ids = check_ids
        self._declared: dict[str, tuple[PublicPrompt, PublicPrefix]] = {}

    def declare(self, token_ids: Sequence[int], name: str | None = None) -> PublicPrompt:
        """Let all tenants share what begins with these tokens; the same again changes the name.

        Raises InvalidRequest if these are no tokens, the cache is off, or it has not the room to
        keep them. It is resident once somebody has sent a prompt that begins with it.
        """
        self._check_ids(token_ids, "tokens")
        identity, tokens = self._identity(), encode(token_ids)
        return self._core.call(lambda: self._declare(identity, tokens, name)).result()

    def withdraw(self, prompt_id: str) -> bool:
        """Let nobody find it any more who comes from now on; False if there is none."""
        return self._core.call(lambda: self._withdraw(prompt_id)).result()

    def list(self) -> list[PublicPrompt]:
        """Return all, in the order in which they were declared."""
        return self._core.call(
            lambda: [self._shown(prompt_id) for prompt_id in self._declared]
        ).result()

    def show(self, prompt_id: str) -> PublicPrompt:
        """Return one as it is now; raises NotFound."""
        return self._core.call(lambda: self._shown(prompt_id)).result()

    # ---- on the engine thread -------------------------------------------------------------------

    def _declare(self, identity: CacheIdentity, tokens: bytes, name: str | None) -> PublicPrompt:
        cache = self._core.cache
        if not cache.enabled or cache.force_miss:
            raise InvalidRequest("this server runs without a prefix cache: nothing can be shared")
        for prompt_id, (prompt, prefix) in self._declared.items():
            if prefix.identity == identity and prefix.tokens == tokens:
                self._declared[prompt_id] = replace(prompt, name=name or prompt.name), prefix
                return self._shown(prompt_id)
        num_tokens = len(tokens) // 4
        prompt = PublicPrompt(
            id=f"pub-{uuid.uuid4().hex}",
            name=name,
            num_tokens=num_tokens,
            num_blocks=-(-num_tokens // cache.block_size),
            resident_tokens=0,
            created_at=time.time(),
        )
        kept, most = self.kept_blocks + prompt.num_blocks, self._most()
        if kept > most:
            raise InvalidRequest(
                f"public prompts would keep {kept} blocks resident, and may keep {most} beside "
                "what tenants and pins were promised and the longest request"
            )
        prefix = cache.declare_public(identity, tokens)
        self._declared[prompt.id] = prompt, prefix
        self._keep()
        return self._shown(prompt.id)

    def _withdraw(self, prompt_id: str) -> bool:
        found = self._declared.pop(prompt_id, None)
        if found is None:
            return False
        self._core.cache.withdraw_public(found[1])
        self._keep()
        return True

    def _keep(self) -> None:
        """Let nobody's work take what is declared."""
        self.kept_blocks = sum(prompt.num_blocks for prompt, _ in self._declared.values())
        self._core.cache.set_share(None, floor=self.kept_blocks)

    def _most(self) -> int:
        """Blocks that may stay resident. Pins are promised that the longest request fits beside
        them and the floors, of which this is one."""
        left, pinned = self._core.cache.accounts.ceiling(None), self._keeper.promised_blocks
        if not pinned:
            return left // 2
        floors = self._capacity.num_blocks - left
        return max(0, min(left // 2, self._capacity.spare_blocks - floors - pinned))

    def _shown(self, prompt_id: str) -> PublicPrompt:
        found = self._declared.get(prompt_id)
        if found is None:
            raise NotFound("there is no public prompt of this id")
        prompt, prefix = found
        # One token more, for a look-up never finds a prompt's last.
        resident = self._core.cache.lookup(prefix.identity, prefix.tokens + encode([0]))
        return replace(prompt, resident_tokens=resident)


def public(identity: CacheIdentity) -> CacheIdentity:
    """Return ``identity`` in the namespace of everybody."""
    return replace(identity, namespace=Namespace.public())


def chat_prefix(
    render: Callable[..., list[int]],
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens with which every chat begins that begins with ``messages``.

    Those of the messages alone where the template writes the next message behind them, else what
    two chats that go on differently have in common. Raises InvalidRequest if that is nothing.
    """
    role = "assistant" if messages and messages[-1]["role"] == "user" else "user"

    def rendered(*more: Mapping[str, Any]) -> list[int]:
        return render(
            [*messages, *more], add_generation_prompt=False, template_kwargs=template_kwargs
        )

    one, two = (rendered({"role": role, "content": text}) for text in ("a", "Z"))
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    try:
        alone = rendered()
    except InvalidRequest:  # a template that wants a user's message
        alone = []
    if alone and one[: len(alone)] == two[: len(alone)] == alone:
        return alone
    if not common:
        raise InvalidRequest(
            "with this model's template, chats that begin with these messages have no token in "
            "common",
            param="messages",
        )
    return one[:common]
