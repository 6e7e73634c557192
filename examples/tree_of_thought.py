"""Tree of thought: lines of a poem are proposed by forks of a session, judged, and the best go on.

Run: python examples/tree_of_thought.py [--model smollm2] [--lines 3] [--proposals 3] [--keep 2]

Each proposal and each judge is a fork: it begins with all that its branch has said, whose KV is
shared, and computes its own few tokens. What is kept stays resident; the rest is let go.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from radixkv import Engine, Session, Turn

SYSTEM = """You write short poems together with a user, one line at a time. A line has five to ten
words, paints one picture, and follows from the lines before it. It never repeats one of them, it
does not explain itself, and it ends with a comma or a full stop. You answer with the line alone:
no title, no quotation marks, no number, no remark before or after it."""
FIRST = "The poem is about {topic}. Write its first line."
NEXT = "Write the next line."
JUDGE = "Is that a beautiful line that follows from the rest? Answer with Yes or No."


def ask_all(sessions: Sequence[Session], text: str, **sampling: Any) -> list[Turn]:
    """Send all of them the same at once, and wait for the answers."""
    replies = [session.send(text, **sampling) for session in sessions]
    return [reply.result() for reply in replies]


def approval(turn: Turn) -> float:
    """How much rather the model says Yes than No."""
    assert turn.logprobs is not None
    said = {text.strip().lower(): logprob for _, text, _, logprob in turn.logprobs[0].top}
    return said.get("yes", -20.0) - said.get("no", -20.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--topic", default="the sea at night")
    parser.add_argument("--lines", type=int, default=3)
    parser.add_argument("--proposals", type=int, default=3, help="from each branch that was kept")
    parser.add_argument("--keep", type=int, default=2, help="branches that go on")
    args = parser.parse_args()

    turns: list[Turn] = []
    with Engine(args.model, kv_memory="512MiB", max_model_len=2048) as engine:
        engine.warm_up()
        start = time.perf_counter()
        drawn: dict[str, Any] = {
            "temperature": 0.9,
            "top_p": 0.95,
            "seed": 1,
            "max_tokens": 20,
            "stop": "\n",
        }
        kept = [engine.session(system=SYSTEM, **drawn)]
        for number in range(args.lines):
            ask = NEXT if number else FIRST.format(topic=args.topic)
            proposals = [fork for branch in kept for fork in branch.fork(args.proposals)]
            turns += ask_all(proposals, ask)
            judges = [proposal.branch() for proposal in proposals]
            verdicts = ask_all(judges, JUDGE, max_tokens=1, temperature=0.0, logprobs=20)
            turns += verdicts
            scores = [approval(verdict) for verdict in verdicts]
            order = sorted(range(len(proposals)), key=scores.__getitem__, reverse=True)
            for i in order:
                mark = "*" if i in order[: args.keep] else " "
                print(
                    f"{number + 1} {mark} {scores[i]:6.2f}  {proposals[i].turns[-1].text.strip()}"
                )
            for branch in [*kept, *judges, *(proposals[i] for i in order[args.keep :])]:
                branch.close()
            kept = [proposals[i] for i in order[: args.keep]]
        seconds = time.perf_counter() - start

        print()
        for turn in kept[0].turns:
            print(turn.text.strip())
        print()
        held = kept[0].lease
        print(f"the best branch holds {held.tokens} tokens in {held.blocks} blocks")
        prompts = sum(turn.usage.prompt_tokens for turn in turns)
        cached = sum(turn.cached_tokens for turn in turns)
        print(
            f"{len(turns)} turns in {seconds:.1f} s: {prompts} prompt tokens, {cached} cached, "
            f"{prompts - cached} computed; {engine.cache.stats().cow_copies} blocks copied"
        )
        for branch in kept:
            branch.close()


if __name__ == "__main__":
    main()
