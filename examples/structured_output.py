"""Fill in forms: each message becomes an object of one class, by a model of 135 M parameters.

Run: python examples/structured_output.py [--model smollm2]

The instructions and the examples are the same for each message, so they are computed once. A
grammar lets the model write nothing but the form, so each answer can be parsed, whatever it says.
"""

from __future__ import annotations

import argparse
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from radixkv import Engine

SYSTEM = """You sort messages that customers of a shop have written. For each message you fill in a
form: what it is about, how urgent it is from 1 to 5, and a short title.

Message: "I was charged twice for one pair of shoes!"
{"topic":"billing","urgency":4,"title":"Charged twice"}
Message: "Do you have the green jacket in size M?"
{"topic":"product","urgency":1,"title":"Green jacket in M"}"""
MESSAGES = (
    "My parcel was to be here a week ago. Where is it?",
    "The zipper of my new bag broke on the first day, and I want my money back.",
    "Could you tell me whether the lamp works at 110 volts?",
)


class Ticket(BaseModel):
    """The form."""

    model_config = ConfigDict(extra="forbid")

    topic: Literal["billing", "delivery", "product", "returns"]
    urgency: int = Field(ge=1, le=5)
    title: str = Field(min_length=3, max_length=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    with Engine(args.model, kv_memory="256MiB", max_model_len=2048) as engine:
        for message in MESSAGES:
            answer = engine.chat(
                [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f'Message: "{message}"'},
                ],
                json_schema=Ticket,
                temperature=0,
                max_tokens=100,
            )
            ticket = Ticket.model_validate_json(answer.text)
            usage = answer.usage
            print(f"\n> {message}\n{ticket!r}")
            print(
                f"  [{usage.cached_tokens} prompt tokens cached, "
                f"{usage.prompt_tokens - usage.cached_tokens} computed]"
            )
        verdict = engine.chat(
            [{"role": "user", "content": "Is a refund a return of money? Answer yes or no."}],
            choice=["yes", "no"],
            temperature=0,
        )
        print(f"\nOne of two words: {verdict.text}")


if __name__ == "__main__":
    main()
