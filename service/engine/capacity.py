"""What the KV memory can hold, and so which requests are refused at once instead of never served.

Knows token and block counts only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixkv.errors import ContextTooLong, InvalidConfig, NeverFits
from radixkv.service.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Capacity:
    """The blocks of one pool, and the longest context that model, settings and pool allow.

    Pinned prefixes hold at most ``pinnable_blocks``: what a request may need is counted without
    them, so that the oldest request always fits, whatever is pinned.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    pinnable_blocks: int = 0

    @classmethod
    def plan(
        cls,
        *,
        kv_memory: int,
        bytes_per_block: int,
        block_size: int,
        model_len: int,
        max_model_len: int | None,
        pin_budget: float = 0.0,
    ) -> Capacity:
        """Divide ``kv_memory`` bytes into blocks; raises InvalidConfig if that gives too few.

        ``pin_budget`` is the share of them that may be pinned, if the longest context leaves it.
        """
        num_blocks = kv_memory // bytes_per_block
        if num_blocks < 2:
            raise InvalidConfig(
                f"kv_memory is {kv_memory} bytes; this model needs {bytes_per_block} for a block "
                f"of {block_size} tokens, and two blocks at least"
            )
        if max_model_len is not None and max_model_len > model_len:
            raise InvalidConfig(
                f"max_model_len is {max_model_len}; this model was made for {model_len} at most"
            )
        longest = min(max_model_len or model_len, num_blocks * block_size)
        bare = cls(num_blocks, block_size, longest)
        return replace(bare, pinnable_blocks=min(int(pin_budget * num_blocks), bare.spare_blocks))

    @property
    def spare_blocks(self) -> int:
        """Blocks beside those that hold the longest context."""
        return self.num_blocks - -(-self.max_model_len // self.block_size)

    def max_tokens(
        self, prompt_tokens: int, params: SamplingParams, *, param: str, kept_blocks: int = 0
    ) -> int:
        """Tokens that each choice may generate: what was asked, else all that there is room for.

        Raises ContextTooLong or NeverFits if the prompt, or what was asked, has no room even alone.
        ``kept_blocks`` are promised to others, used or not; what is pinned may be part of them. The
        choices share the prompt's whole blocks and each has its own from there on:

            | shared whole blocks | rest of the prompt + output | x n      the last token drawn
            |                     |                             |          never gets a KV entry

        So the first token needs no more than the prompt, whatever ``n``: it is drawn from logits
        that the choices share.
        """
        room = self.max_model_len - prompt_tokens
        if room < (params.max_tokens or 1):
            raise ContextTooLong(
                limit=self.max_model_len,
                prompt_tokens=prompt_tokens,
                max_tokens=params.max_tokens if room >= 1 else None,
                param=param,
            )
        size = self.block_size
        shared = prompt_tokens // size
        num_blocks = self.num_blocks - max(self.pinnable_blocks, kept_blocks)
        if -(-prompt_tokens // size) > num_blocks:
            raise NeverFits(need_blocks=-(-prompt_tokens // size), capacity_blocks=num_blocks)
        own = (num_blocks - shared) // params.num_sequences
        most = max(1, (shared + own) * size - prompt_tokens + 1)
        wanted = min(room, most) if params.max_tokens is None else params.max_tokens
        if wanted > most:
            each = -(-(prompt_tokens + wanted - 1 - shared * size) // size)
            need = shared + params.num_sequences * each
            raise NeverFits(need_blocks=need, capacity_blocks=num_blocks)
        return wanted
