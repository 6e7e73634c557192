"""Talk to a running server with Anthropic's own client, and keep a long system prompt resident.

radixkv serve &
pip install anthropic
python examples/chat_with_anthropic_client.py
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

try:
    import anthropic
except ModuleNotFoundError:
    sys.exit("this example needs Anthropic's client; install it with: pip install anthropic")

RULES = "You are the guide of a small museum of clocks. " + "Answer in one short sentence. " * 60


def main() -> None:
    """Take the options and ask; what goes wrong there is said in one line."""
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
        converse(anthropic.Anthropic(base_url=url, api_key=asked.key))
    except anthropic.APIConnectionError:
        sys.exit(f"no server answers at {url}; start one with: radixkv serve")
    except anthropic.APIError as e:
        sys.exit(f"{url} says: {e.message}")


def converse(client: anthropic.Anthropic) -> None:
    """Ask two questions; the second finds the system prompt that the first has pinned."""
    system: Any = [
        {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    for question in ("Which clock is the oldest?", "And which one is the loudest?"):
        with client.messages.stream(
            model="default",
            max_tokens=40,
            system=system,
            messages=[{"role": "user", "content": question}],
        ) as stream:
            print(f"{question} ", end="")
            for text in stream.text_stream:
                print(text, end="", flush=True)
            usage = stream.get_final_message().usage
        print(
            f"\n  read {usage.cache_read_input_tokens} tokens from the cache, put in "
            f"{usage.cache_creation_input_tokens} to stay, computed {usage.input_tokens} more"
        )


if __name__ == "__main__":
    main()
