"""What an answer must look like, as OpenAI, vLLM, SGLang and llama.cpp let clients say it.

Knows the fields, and which of them mean the same; what a schema means is ``GrammarSpec``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.http.fields import Strict
from radixkv.service.http.unsupported import STRUCTURED, refuse_unsupported

_SCHEMA = "json_schema"
Schema = dict[str, Any] | bool | str
"""A JSON schema, or its text."""


class NamedSchema(Strict):
    """OpenAI's ``json_schema``."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers are held to the schema either way.")


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="llama.cpp's way to give a schema."
    )


class SchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="A pattern that all of the text must match.")
    choice: list[str] | None = Field(None, description="The text is one of these.")
    grammar: str | None = Field(None, description="A grammar: Lark as llguidance has it, or GBNF.")
    json_object: bool | None = Field(None, description="True: the text is a JSON object.")


class StructuredFields(Strict):
    """The ways to say it in a request for a chat or a completion, at most one of which may."""

    response_format: (
        Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = Field(
        None,
        description="What the text must be. The answer ends with the token that completes it; one "
        "cut by `max_tokens` or a stop string is incomplete.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's extension: one of its fields says what the text must be."
    )
    guided_json: Schema | None = Field(None, description="As `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="As `structured_outputs.regex`.")
    guided_choice: list[str] | None = Field(None, description="As `structured_outputs.choice`.")
    guided_grammar: str | None = Field(None, description="As `structured_outputs.grammar`.")
    json_schema: Schema | None = Field(None, description="llama.cpp's and SGLang's: a schema.")
    regex: str | None = Field(None, description="SGLang's: a pattern.")
    ebnf: str | None = Field(None, description="SGLang's: a grammar.")
    grammar: str | None = Field(None, description="llama.cpp's: a grammar.")

    def grammar_spec(self) -> GrammarSpec | None:
        """Return what the text must look like, if anything says so; raises InvalidRequest."""
        found = list(self._forms())
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise InvalidRequest(f"{names} are given; wanted one of them", param=found[0][0])
        for field, (kind, value) in found:
            return _spec(field, kind, value)
        return None

    @property
    def form_field(self) -> str:
        """The field that says what the text must look like, for errors to name."""
        return next((field for field, _ in self._forms()), "response_format")

    def _forms(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        asked = self.response_format
        if isinstance(asked, ObjectFormat):
            wanted = ("json_object", None) if asked.schema_ is None else (_SCHEMA, asked.schema_)
            yield "response_format", wanted
        elif isinstance(asked, SchemaFormat):
            if asked.json_schema.schema_ is None:
                raise InvalidRequest(
                    "response_format.json_schema has no schema", param="response_format"
                )
            yield "response_format", (_SCHEMA, asked.json_schema.schema_)
        outputs = self.structured_outputs
        if outputs is not None:
            refuse_unsupported(outputs.model_extra, STRUCTURED, at="structured_outputs.")
            if outputs.json_object:
                yield "structured_outputs.json_object", ("json_object", None)
        for field, kind, value in (
            ("structured_outputs.json", _SCHEMA, outputs and outputs.json_),
            ("structured_outputs.regex", "regex", outputs and outputs.regex),
            ("structured_outputs.choice", "choice", outputs and outputs.choice),
            ("structured_outputs.grammar", "lark", outputs and outputs.grammar),
            ("guided_json", _SCHEMA, self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "lark", self.guided_grammar),
            ("json_schema", _SCHEMA, self.json_schema),
            ("regex", "regex", self.regex),
            ("ebnf", "lark", self.ebnf),
            ("grammar", "lark", self.grammar),
        ):
            if value is not None and value not in ("", []):  # which clients send by default
                yield field, (kind, value)


def _spec(field: str, kind: str, value: Any) -> GrammarSpec:
    make: Callable[..., GrammarSpec] = getattr(GrammarSpec, kind)
    try:
        return make() if value is None else make(value)
    except InvalidRequest as e:
        e.param = field
        raise
