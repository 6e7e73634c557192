"""Times columns of calls on one device, in turn; knows streams, graphs and clocks, no kernels."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Column:
    """Something to time. ``call(i)`` works on the ``i``-th of several sets of data.

    Calls that cannot be captured in a CUDA graph are timed as they are launched.
    """

    call: Callable[[int], object]
    graph: bool = True


def median_seconds(
    columns: dict[str, Column], sets: int, rounds: int, device: torch.device, notes: list[str]
) -> dict[str, float]:
    """Time every column ``rounds`` times, one after the other; the median, in seconds a call.

    Rounds of 0 time what otherwise only warms.

    In turn, so that what else slows the machine slows all of them. On a GPU the calls on all sets
    are one CUDA graph, as an engine would run them: what is timed is the GPU's work alone. A column
    that refuses to be captured is timed as launched, which ``notes`` then say.
    """
    cuda = device.type == "cuda"
    runs: dict[str, Callable[[], object]] = {}
    for name, column in columns.items():
        calls = _on_all(column.call, sets)
        runs[name] = calls
        if cuda and column.graph:
            try:
                runs[name] = _captured(calls)
            except RuntimeError as error:
                notes.append(f"{name} is timed as launched: {str(error).splitlines()[0]}")
                torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in columns}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            seconds = _gpu_seconds(run) if cuda else _cpu_seconds(run)
            if turn or not rounds:  # the first only warms
                times[name].append(seconds / sets)
    return {name: statistics.median(values) for name, values in times.items()}


def _on_all(call: Callable[[int], object], sets: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(sets):
            call(i)

    return run


def _captured(calls: Callable[[], None]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()  # compiles, and plans what a capture could not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    replay: Callable[[], Any] = graph.replay
    return replay


def _gpu_seconds(run: Callable[[], object]) -> float:
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
