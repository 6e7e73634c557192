"""The prefix cache alone, with integer tokens and a list for a device. Needs no torch."""

from radixkv import CacheIdentity, PrefixCache
from radixkv.tokens import encode

cache = PrefixCache(num_blocks=64, block_size=16)
model = CacheIdentity.local("my model")
device: dict[tuple[int, int], int] = {}  # (block, offset) -> the KV of one token


def prefill(prompt: list[int]) -> None:
    tokens = encode(prompt)
    with cache.open(cache.acquire(model, tokens)) as table:
        print(f"cached {table.num_tokens} of {len(prompt)} tokens, blocks {table.blocks.tolist()}")
        missing = len(prompt) - table.num_tokens
        for source, target, n in table.reserve(missing):  # blocks that others hold are copied
            device.update({(target, i): device[source, i] for i in range(n)})
        for at in range(table.num_tokens, len(prompt)):
            device[int(table.blocks[at // 16]), at % 16] = prompt[at]  # compute, and write
        table.commit(missing)
        table.publish(tokens, tail=True)  # from here on others may share it


prefill(list(range(60)))
prefill([*range(56), 7, 7, 7, 7])
print(cache.stats())
assert cache.check() == []
