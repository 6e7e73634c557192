"""pydantic-ai pointed at a running server: answers as typed objects, under one cached prompt.

radixkv serve --chat-template examples/templates/chatml_tools.jinja
pip install 'pydantic-ai-slim[openai]'
python examples/agent_with_pydantic_ai.py
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Literal

from pydantic import BaseModel, Field

try:
    from pydantic_ai import Agent, ModelSettings
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ModuleNotFoundError:
    sys.exit("this example needs pydantic-ai; pip install 'pydantic-ai-slim[openai]'")

INSTRUCTIONS = """You sort the mail of a bicycle shop. A message that reports something broken is a
repair; one that asks what something costs, or whether it is there, is a sale; one that asks for
money back is a refund; everything else is other. It is urgent if somebody cannot ride until it is
answered. Never guess: what the message does not say is not urgent."""
MAIL = (
    "My chain broke this morning and I need the bike for work.",
    "Do you have blue saddles, and what do they cost?",
    "The lamp that I bought does not fit. I would like my money back.",
)


class Ticket(BaseModel):
    """What a message is about."""

    kind: Literal["repair", "sale", "refund", "other"]
    urgent: bool
    stars: int = Field(ge=1, le=5, description="How friendly the message is.")


def main() -> None:
    """Take the options and sort; what goes wrong there is said in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument(
        "--key",
        default=os.environ.get("RADIXKV_API_KEY") or "none",
        help="a tenant's key, if the server has tenants; default: RADIXKV_API_KEY",
    )
    asked = parser.parse_args()
    url = asked.url.rstrip("/").removesuffix("/v1")
    try:
        sort(OpenAIProvider(base_url=f"{url}/v1", api_key=asked.key))
    except ModelHTTPError as e:
        sys.exit(f"{url} says: {e}")
    except ModelAPIError:
        sys.exit(f"no server answers at {url}; start one with: radixkv serve --chat-template FILE")


def sort(provider: OpenAIProvider) -> None:
    """Sort three messages: a grammar makes each answer a Ticket, and the cache shares the rest."""
    agent = Agent(
        OpenAIChatModel("default", provider=provider),
        instructions=INSTRUCTIONS,
        output_type=Ticket,
        model_settings=ModelSettings(temperature=0, max_tokens=80, parallel_tool_calls=False),
    )
    for message in MAIL:
        result = agent.run_sync(message)
        usage = result.usage
        print(f"{message}\n  {result.output!r}")
        cached = usage.cache_read_tokens
        print(f"  [{cached} prompt tokens cached, {usage.input_tokens - cached} computed]")


if __name__ == "__main__":
    main()
