"""LangChain pointed at a running server: a model with tools, and what of each prompt was cached.

radixkv serve --chat-template examples/templates/chatml_tools.jinja
pip install langchain-openai
python examples/agent_with_langchain.py
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Literal

try:
    import openai
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
except ModuleNotFoundError:
    sys.exit("this example needs LangChain; install it with: pip install langchain-openai")

QUESTIONS = ("What is the weather in Oslo?", "And in Rome?")


@tool
def weather(city: Literal["Oslo", "Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return {"Oslo": "snow, -4 degrees", "Paris": "rain, 8 degrees", "Rome": "sun, 15 degrees"}[city]


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
    model = ChatOpenAI(
        model="default",
        base_url=f"{url}/v1",
        api_key=asked.key,
        temperature=0,
        max_completion_tokens=60,
    )
    try:
        converse(model)
    except openai.APIConnectionError:
        sys.exit(f"no server answers at {url}; start one with: radixkv serve --chat-template FILE")
    except openai.APIError as e:
        sys.exit(f"{url} says: {e.message}")


def converse(model: ChatOpenAI) -> None:
    """Ask twice; each time the model must call the tool, and then answers in words."""
    # Both show the model the same tools, so that they share what is cached of the prompt.
    caller = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    speaker = model.bind_tools([weather], tool_choice="none")
    history: list[BaseMessage] = [SystemMessage("You are brief. Use the tool, then answer.")]
    for question in QUESTIONS:
        print(f"> {question}")
        history.append(HumanMessage(question))
        called = caller.invoke(history)
        history.append(called)
        report(called)
        for call in called.tool_calls:
            result = weather.invoke(call)
            print(f"  {call['name']}({call['args']}) = {result.content}")
            history.append(result)
        answer = speaker.invoke(history)
        history.append(answer)
        report(answer)
        print(answer.content)


def report(message: AIMessage) -> None:
    """Print where the prompt's tokens came from."""
    usage = message.usage_metadata
    assert usage is not None
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    print(f"  [{cached} prompt tokens cached, {usage['input_tokens'] - cached} computed]")


if __name__ == "__main__":
    main()
