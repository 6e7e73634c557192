"""Functions that a chat may call, as OpenAI's clients write them, and how they want them called.

Checks shapes; tools stay as they were sent, key for key, for that is how templates show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from radixkv.errors import InvalidRequest
from radixkv.service.http.faults import explain
from radixkv.service.http.fields import Strict
from radixkv.service.http.unsupported import refuse_kind
from radixkv.service.tools_grammar import Function

MAX_TOOLS = 1024
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class FunctionShape(Strict):
    """A function: what it is called, what it does, and the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="Left out: it takes none.")
    strict: bool | None = Field(
        None, description="Calls keep to the schema even where none is forced."
    )


class FunctionTool(Strict):
    """A tool. Those of other types are refused."""

    type: Literal["function"]
    function: FunctionShape


def _as_sent(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Check tools and keep what was sent: the order of keys is what the model is shown."""
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        refuse_kind(tool, ("function",), f"tools[{i}]", "this server's model calls functions only")
    handler(value)
    return value


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), WrapValidator(_as_sent)]
"""Becomes the list of objects that was sent."""


class FunctionRef(Strict):
    """A function by its name."""

    name: str


class NamedChoice(Strict):
    """This function is to be called."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTool(Strict):
    """A function that may be called."""

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(Strict):
    """Functions that may be called, of those that are shown."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


class AllowedChoice(Strict):
    """Only some functions may be called; the prompt shows all, so that it stays cached."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _read_choice(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if not isinstance(value, dict):
        if value not in ("none", "auto", "required"):
            raise ValueError("wanted none, auto, required, or a function as an object")
        return value
    model = AllowedChoice if value.get("type") == "allowed_tools" else NamedChoice
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise explain(e, "tool_choice") from None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedChoice, WrapValidator(_read_choice)
]


@dataclass(frozen=True, slots=True)
class Calling:
    """What a request wants of the model's calls."""

    functions: tuple[Function, ...] = ()
    mode: Literal["none", "auto", "required"] = "auto"
    only: frozenset[str] | None = None
    """Functions that may be called; None: all."""
    several: bool = True
    """Whether an answer may have more than one call."""


def calling_of(
    tools: list[dict[str, Any]] | None,
    choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None,
    several: bool | None,
) -> Calling:
    """Put tools and choice together; raises InvalidRequest where they do not fit."""
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if not functions and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is only accepted with tools", param="tool_choice")
    mode: Literal["none", "auto", "required"] = "auto"
    only: frozenset[str] | None = None
    if isinstance(choice, NamedChoice):
        mode, only, several = "required", frozenset({choice.function.name}), False
    elif isinstance(choice, AllowedChoice):
        mode = choice.allowed_tools.mode
        only = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
    elif choice is not None:
        mode = choice
    unknown = sorted((only or frozenset()) - {function.name for function in functions})
    if unknown:
        raise InvalidRequest(
            f"tool_choice names {unknown[0][:80]!r}, which is not among tools", param="tool_choice"
        )
    return Calling(functions, mode, only, several is not False)


def _function(tool: Mapping[str, Any], at: str) -> Function:
    shape = tool["function"]
    return Function(
        shape["name"],
        shape.get("parameters"),
        bool(shape.get("strict")),
        f"{at}.function.parameters",
    )
