"""Tools as Anthropic's clients write them, and how they want them called.

They are shown to the model in OpenAI's shape, so that the same tools are the same prompt whichever
client sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from radixkv.errors import InvalidRequest
from radixkv.service.http.fields import Strict
from radixkv.service.http.marks import CacheControl
from radixkv.service.http.tools_schema import MAX_TOOLS, Calling, FunctionName
from radixkv.service.http.unsupported import refuse_kind
from radixkv.service.tools_grammar import Function


class AnthropicTool(Strict):
    """A function of the client's. Tools that a server runs are refused."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="The JSON schema of its input.")
    type: Literal["custom"] | None = None
    strict: bool | None = Field(
        None, description="Calls keep to the schema even where none is forced."
    )
    cache_control: CacheControl | None = None


def _check_kinds(value: object) -> object:
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        refuse_kind(tool, ("custom",), f"tools[{i}]", "this server runs no tools of its own")
    return value


AnthropicTools = Annotated[
    list[AnthropicTool], Field(max_length=MAX_TOOLS), BeforeValidator(_check_kinds)
]


class AnthropicToolChoice(Strict):
    """Whether there is to be a call: `any` is one of any tool, `tool` one of the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(
        None, description="True: at most one call an answer."
    )


def shown_tools(tools: Sequence[AnthropicTool] | None) -> list[dict[str, Any]] | None:
    """Return the tools as templates are shown them; None if there are none."""
    shown = []
    for tool in tools or ():
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        shown.append({"type": "function", "function": function})
    return shown or None


def calling_of(
    tools: Sequence[AnthropicTool] | None, choice: AnthropicToolChoice | None
) -> Calling:
    """Put tools and choice together; raises InvalidRequest where they do not fit."""
    functions = tuple(
        Function(tool.name, tool.input_schema, bool(tool.strict), f"tools[{i}].input_schema")
        for i, tool in enumerate(tools or ())
    )
    if choice is None:
        return Calling(functions)
    if not functions and choice.type in ("any", "tool"):
        raise InvalidRequest("tool_choice is only accepted with tools", param="tool_choice")
    several = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        modes: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "any": "required"}
        return Calling(functions, modes.get(choice.type, "auto"), None, several)
    if choice.name not in {function.name for function in functions}:
        raise InvalidRequest(
            f"tool_choice names {str(choice.name)[:80]!r}, which is not among tools",
            param="tool_choice.name",
        )
    return Calling(functions, "required", frozenset({str(choice.name)}), several)
