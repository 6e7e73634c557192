"""Talk to a running server with OpenAI's client, and watch the prefix come from the cache.

radixkv serve                                  # in another terminal
python examples/chat_with_openai_client.py     # needs: pip install openai
"""

from __future__ import annotations

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


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Hold a short conversation; each turn sends the whole of it again."""
    client = openai.OpenAI(base_url=base_url, api_key="not-needed")
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"no server answers at {base_url}; start one with: radixkv serve")
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
    main(*sys.argv[1:2])
