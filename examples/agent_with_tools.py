"""An agent that calls functions in a loop, with OpenAI's client and any model.

radixkv serve --chat-template examples/templates/chatml_tools.jinja     # for the small model, whose
python examples/agent_with_tools.py                                     # own template has no tools

Each step sends the whole of what was said so far, so all but the last result comes from the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

try:
    import openai
except ModuleNotFoundError:
    sys.exit("this example needs OpenAI's client; install it with: pip install openai")

POPULATION = {"Oslo": 717_710, "Paris": 2_103_778, "Rome": 2_751_747}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "population",
            "description": "How many people live in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": sorted(POPULATION)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
                    "b": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
QUESTION = "How many people live in Paris and in Oslo together?"


def run(name: str, arguments: str) -> str:
    """Do what the model asks for, or tell it what is wrong with that."""
    try:
        given = json.loads(arguments)
        if name == "population":
            return str(POPULATION[given["city"]])
        if name == "add":
            return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError) as e:
        return f"error: {e!r}"
    return f"error: there is no function {name}"


def main() -> None:
    """Take the options and let the agent run; what goes wrong there is said in one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument(
        "--key",
        default=os.environ.get("RADIXKV_API_KEY") or "none",
        help="a tenant's key, if the server has tenants; default: RADIXKV_API_KEY",
    )
    parser.add_argument(
        "--forced-steps",
        type=int,
        default=2,
        help="steps in which there must be a call (a grammar sees to it): small models need a push",
    )
    parser.add_argument("--max-steps", type=int, default=5)
    asked = parser.parse_args()
    url = asked.url.rstrip("/").removesuffix("/v1")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=asked.key)
    try:
        agent(client, asked.forced_steps, asked.max_steps)
    except openai.APIConnectionError:
        sys.exit(f"no server answers at {url}; start one with: radixkv serve --chat-template FILE")
    except openai.APIError as e:
        sys.exit(f"{url} says: {e.message}")


def agent(client: openai.OpenAI, forced_steps: int, max_steps: int) -> None:
    """Let the model call until it answers in words, or has had its steps."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the functions, and answer in one short sentence."},
        {"role": "user", "content": QUESTION},
    ]
    print(f"> {QUESTION}")
    prompted = computed = 0
    for step in range(1, max_steps + 1):
        choice: Any = "required" if step <= forced_steps else "auto"
        reply = client.chat.completions.create(
            model="default",
            messages=messages,
            tools=TOOLS,
            tool_choice="none" if step == max_steps else choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
        )
        message, usage = reply.choices[0].message, reply.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        prompted, computed = prompted + usage.prompt_tokens, computed + usage.prompt_tokens - cached
        print(
            f"step {step}: {cached} prompt tokens cached, {usage.prompt_tokens - cached} computed"
        )
        # What is sent back is what was said: the next step's prompt begins with all of this one's.
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            break
        for call in message.tool_calls:
            assert call.type == "function"
            result = run(call.function.name, call.function.arguments)
            print(f"  {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"in all: {prompted - computed} prompt tokens cached, {computed} computed")


if __name__ == "__main__":
    main()
