"""Write what an answer must look like in llguidance's own form.

Knows the notations, llama.cpp's among them, and refuses what could never end; nothing of tokens.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.engine.grammar_ends import schema_can_end
from radixkv.service.engine.grammar_lark import lark_can_end
from radixkv.service.engine.grammar_state import in_brief

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GBNF_CHARS = 16 * 1024
"""llama.cpp's notation is translated by Python, while other Python threads wait."""
# Between members at most one space, or a new line with an indent: a weak model that may write any
# white space is apt to write nothing else. A schema's own `x-guidance` goes first.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"( |\n[ \t]{0,40})?"}
_GBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)


def source_of(spec: GrammarSpec) -> str:
    """Return ``spec`` in llguidance's own form; raises InvalidRequest."""
    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=_JSON)
        case "json_schema":
            schema = "{}" if json.loads(spec.source) is True else spec.source
            if not schema_can_end(schema):
                raise InvalidRequest("json_schema: no answer could ever end")
            try:
                return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
            except ValueError as e:
                raise InvalidRequest(f"json_schema: {in_brief(str(e))}") from None
        case "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            options = dict.fromkeys(json.loads(spec.source))
            # One word to the lexer: as so many rules they would be looked at one by one.
            words = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
            return LLMatcher.grammar_from_lark(f"start: OPTION\nOPTION: {words}")
        case "lark":
            lark = _from_gbnf(spec.source) if _GBNF.search(spec.source) else spec.source
            if not lark_can_end(lark):
                raise InvalidRequest("grammar: no answer could ever end")
            return LLMatcher.grammar_from_lark(lark)


def _from_gbnf(source: str) -> str:
    """Translate llama.cpp's notation."""
    if len(source) > MAX_GBNF_CHARS:
        raise InvalidRequest(
            f"grammar has {len(source)} characters of GBNF; at most {MAX_GBNF_CHARS} are accepted"
        )
    try:
        return gbnf_to_lark(source)
    except (GbnfToLarkError, RecursionError) as e:
        raise InvalidRequest(f"grammar is no GBNF: {in_brief(str(e))}") from None
