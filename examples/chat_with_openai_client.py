"""Talk to a running server with OpenAI's client, and watch the prefix come from the cache.

radixkv serve                                  # in another terminal
python examples/chat_with_openai_client.py     # needs: pip install openai
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

try:
    import openai
except ModuleNotFoundError:
    sys.exit("this example needs OpenAI's client; install it with: pip install openai")

QUESTIONS = (
    "What is a radix tree? Answer in one sentence.",
    "Where is one useful?",
    "And what is a prefix cache?",
)


def main() -> None:
    """Take the options and talk; what goes wrong there is said in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="where the server is"
    )
    parser.add_argument(
        "--key",
        default=os.environ.get("RADIXKV_API_KEY") or "none",
        help="a tenant's key, if the server has tenants; default: RADIXKV_API_KEY",
    )
    asked = parser.parse_args()
    url = asked.url.rstrip("/").removesuffix("/v1")
    try:
        converse(openai.OpenAI(base_url=f"{url}/v1", api_key=asked.key))
    except openai.APIConnectionError:
        sys.exit(f"no server answers at {url}; start one with: radixkv serve")
    except openai.APIError as e:
        sys.exit(f"{url} says: {e.message}")


def converse(client: openai.OpenAI) -> None:
    """Hold a short conversation; each turn sends the whole of it again."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "system", "content": "You are brief and exact."}]
    for question in QUESTIONS:
        print(f"\n> {question}")
        messages.append({"role": "user", "content": question})
        began_s, first_s, answer = time.monotonic(), None, ""
        for chunk in client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=80,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                text = choice.delta.content or ""
                if text and first_s is None:
                    first_s = time.monotonic() - began_s
                answer += text
                print(text, end="", flush=True)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
                computed = chunk.usage.prompt_tokens - cached
                print(
                    f"\n  [{cached} prompt tokens cached, {computed} computed; "
                    f"first token after {first_s or 0:.2f} s]"
                )
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
