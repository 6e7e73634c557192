"""Who listens hears counts of its own tenant, misses nothing in silence, and holds nobody up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from radixkv.service.engine.cache_events import CacheEvents, Listener


class Book:
    """The numbers of a cache's accounts, set by hand."""

    def __init__(self) -> None:
        self.accounts: list[Any] = []
        self.resets = 0

    def stats(self) -> Any:
        return SimpleNamespace(resets=self.resets)

    def account(self, tenant: str) -> Any:
        return next(a for a in self.accounts if a.tenant == tenant)

    def set(self, tenant: str | None, blocks: int = 0, suffered: int = 0, pinned: int = 0) -> None:
        self.accounts = [a for a in self.accounts if a.tenant != tenant]
        self.accounts.append(
            SimpleNamespace(
                tenant=tenant, blocks=blocks, evicted_suffered=suffered, pinned_blocks=pinned
            )
        )


def told(listener: Listener) -> list[tuple[str, str, dict[str, int]]]:
    events, _ = listener.take()
    return [(event.kind, event.tenant, event.counts) for event in events]


def step(events: CacheEvents, book: Book) -> None:
    events.step(book)  # type: ignore[arg-type]


async def test_a_listener_hears_what_changed_since_it_listens() -> None:
    events, book = CacheEvents(), Book()
    book.set("a", blocks=10)
    step(events, book)
    listener = events.listen(None)
    step(events, book)
    assert told(listener) == [], "what was there before is no event"
    book.set("a", blocks=14)
    step(events, book)
    assert told(listener) == [("stored", "a", {"blocks": 4})]
    book.set("a", blocks=11, suffered=5, pinned=2)
    step(events, book)
    assert told(listener) == [
        ("stored", "a", {"blocks": 2}),
        ("evicted", "a", {"blocks": 5}),
        ("pinned", "a", {"blocks": 2}),
    ]
    book.set("a", blocks=0, suffered=5)
    book.resets = 1
    step(events, book)
    assert told(listener) == [("cleared", "a", {"blocks": 11}), ("unpinned", "a", {"blocks": 2})]


async def test_a_tenant_hears_of_itself_alone() -> None:
    """SECURITY-5: neither another's events nor what is public."""
    events, book = CacheEvents(), Book()
    mine, everybody = events.listen({"a"}), events.listen(None)
    step(events, book)
    book.set("a", blocks=1)
    book.set("b", blocks=7)
    book.set(None, blocks=3)
    step(events, book)
    events.tell("hit", "b", tokens=64)
    assert told(mine) == [("stored", "a", {"blocks": 1})]
    assert {tenant for _, tenant, _ in told(everybody)} == {"a", "b"}


async def test_a_slow_listener_is_told_how_much_it_missed() -> None:
    events = CacheEvents()
    listener = events.listen(None, limit=3)
    for _ in range(10):
        events.tell("hit", "a", tokens=1)
    found, dropped = listener.take()
    assert (len(found), dropped) == (3, 7)
    events.tell("hit", "a", tokens=1)
    found, dropped = listener.take()
    assert (len(found), dropped) == (1, 0)


async def test_a_listener_is_woken_and_after_stop_hears_nothing() -> None:
    events = CacheEvents()
    listener = events.listen(None)
    events.tell("preempted", "a", tokens=5)
    await listener.ready.wait()
    assert told(listener) == [("preempted", "a", {"tokens": 5})]
    assert not listener.ready.is_set()
    events.stop(listener)
    assert not events.active
    events.tell("preempted", "a", tokens=5)
    assert told(listener) == []


async def test_nothing_is_read_while_nobody_listens() -> None:
    events = CacheEvents()
    events.step(object())  # type: ignore[arg-type]  # would fail if it were looked at
    events.tell("hit", "a", tokens=1)
