"""Shows how far a batch is: a bar in a terminal, a line every few seconds in a pipe.

Knows the numbers of a run and how to draw them; nothing of how they come about.
"""

from __future__ import annotations

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from radixkv.service.batch.tally import Tally

_DRAW_S = 0.25
_LINE_S = 5.0


async def show_progress(tally: Tally, console: Console) -> None:
    """Draw until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_S)
            console.print(in_words(tally), soft_wrap=True)
    with Progress(
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
    ) as bar:
        task = bar.add_task("reading", total=None)
        while True:
            total = None if tally.reading else max(tally.lines, 1)
            bar.update(task, description=in_words(tally), total=total, completed=tally.finished)
            bar.refresh()
            await asyncio.sleep(_DRAW_S)


def in_words(tally: Tally) -> str:
    """Say how far it is: requests, tokens a second, prompt tokens saved, time left."""
    if tally.reading:
        return f"reading and tokenizing: {tally.lines} requests"
    spent_s = max(time.monotonic() - tally.began_s, 1e-9)
    parts = [f"{tally.finished}/{tally.lines} requests"]
    if tally.refused:
        parts.append(f"{tally.refused} refused")
    done = tally.answered
    if done:
        rate = (tally.prompt_tokens + tally.completion_tokens) / spent_s
        parts.append(f"{rate:.0f} tokens/s")
        parts.append(f"{saved(tally):.0%} of prompt tokens saved")
        left_s = spent_s / done * (tally.lines - tally.finished)
        parts.append(f"about {_duration(left_s)} left")
    return ", ".join(parts)


def summary(tally: Tally) -> list[str]:
    """Say what became of it, line by line."""
    spent_s = max(time.monotonic() - tally.began_s, 1e-9)
    requests = [f"{tally.answered} answered"]
    if tally.refused:
        requests.append(f"{tally.refused} refused")
    if tally.skipped:
        requests.append(f"{tally.skipped} answered before")
    plan, computed = tally.planned, tally.computed_tokens
    lines = [
        f"requests        {', '.join(requests)} in {_duration(spent_s)}",
        f"prompt tokens   {tally.prompt_tokens} sent, {computed} computed "
        f"({saved(tally):.1%} saved)",
    ]
    if plan.num_prompts:
        more = computed - plan.optimum_tokens
        beside = f"{more} more were computed" if more > 0 else "no more were computed"
        repeats = plan.optimum_tokens - plan.unique_tokens
        why = f", and {repeats} for what is not shared by rule" if repeats else ""
        lines.append(
            f"optimum         {plan.optimum_tokens}: the {plan.unique_tokens} unique tokens of "
            f"{plan.num_prompts} prompts{why}; {beside}"
        )
    lines.append(
        f"answers         {tally.completion_tokens} tokens, "
        f"{(tally.prompt_tokens + tally.completion_tokens) / spent_s:.0f} tokens/s in all"
    )
    return lines


def saved(tally: Tally) -> float:
    """Return the share of prompt tokens that were not computed, 0 to 1."""
    return tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
