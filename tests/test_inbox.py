"""What other threads tell the engine thread: all of it, in order, until it is closed."""

from __future__ import annotations

import threading

from radixkv.service.engine.inbox import Inbox


def test_messages_are_read_in_order_those_put_by_messages_too() -> None:
    inbox, said = Inbox(), list[int]()

    def put_another() -> None:
        inbox.put(lambda: said.append(3))

    inbox.put(lambda: said.append(1))
    inbox.put(put_another)
    inbox.put(lambda: said.append(2))
    inbox.read()
    assert said == [1, 2, 3]


def test_a_closed_inbox_takes_nothing_and_what_it_has_can_still_be_read() -> None:
    inbox, said = Inbox(), list[str]()
    assert inbox.put(lambda: said.append("before"))
    inbox.close()
    assert not inbox.put(lambda: said.append("after"))
    assert not inbox.wait(lambda: False)
    inbox.read()
    assert said == ["before"]


def test_a_reader_that_is_busy_does_not_wait() -> None:
    assert Inbox().wait(lambda: True)


def test_a_waiting_reader_is_woken_by_a_message_and_by_the_end() -> None:
    inbox, said = Inbox(), list[str]()

    def run() -> None:
        while inbox.wait(lambda: False):
            inbox.read()

    reader = threading.Thread(target=run)
    reader.start()
    done = threading.Event()
    inbox.put(lambda: said.append("hello"))
    inbox.put(done.set)
    assert done.wait(60)
    inbox.close()
    reader.join(60)
    assert not reader.is_alive() and said == ["hello"]
