"""Did a prompt go on from an earlier one? In the words that Anthropic's and OpenAI's clients know.

Knows how two prompts compare, and what of the later one was cached; nothing of their text.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from radixkv.service.engine.params import Usage
from radixkv.service.http.past_prompts import Comparison, PromptMemory, PromptSections, compare


class CacheMissReason(TypedDict):
    """Anthropic's form: the first section that changed, and what that cost."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: int


class AnthropicDiagnostics(TypedDict):
    """The answer to `diagnostics: {previous_message_id}`; null where nothing changed."""

    cache_miss_reason: CacheMissReason | None


class OpenAIDiagnostics(TypedDict):
    """The answer to `prompt_cache_options: {comparison_response_id}`.

    `reason`: the first section that changed, or `not_resident` where none did and yet tokens were
    missing: ask `/v1/cache/explain` why. `comparison_reusable_tokens`: estimated.
    """

    type: Literal["cache_miss", "cache_hit", "comparison_response_not_found", "unavailable"]
    cache_missed_tokens: int
    reason: str | None
    comparison_reusable_tokens: NotRequired[int]


def anthropic_diagnostics(
    memory: PromptMemory,
    tenant: str,
    previous_id: str | None,
    sections: PromptSections,
    usage: Usage,
) -> AnthropicDiagnostics:
    """Say why the prompt of ``sections`` did not go on from the answer ``previous_id``.

    ``previous_id`` None: a first turn has nothing to be compared with.
    """
    if previous_id is None:
        return {"cache_miss_reason": None}
    missed = usage.prompt_tokens - usage.cached_tokens
    previous = memory.recall(tenant, previous_id, sections)
    if previous is None:
        return {
            "cache_miss_reason": {
                "type": "previous_message_not_found",
                "cache_missed_input_tokens": missed,
            }
        }
    found = compare(previous, sections)
    if found.changed is not None:
        return {"cache_miss_reason": {"type": found.changed, "cache_missed_input_tokens": missed}}
    lost = _lost(found, usage)
    if lost:  # nothing changed, so what is missing is our doing: evicted, expired or disabled
        return {"cache_miss_reason": {"type": "unavailable", "cache_missed_input_tokens": lost}}
    return {"cache_miss_reason": None}


def openai_diagnostics(
    memory: PromptMemory,
    tenant: str,
    comparison_id: str,
    sections: PromptSections,
    usage: Usage,
    *,
    enabled: bool = True,
) -> OpenAIDiagnostics:
    """Say how the prompt of ``sections`` compares with that of the answer ``comparison_id``.

    ``enabled``: whether the server keeps a cache at all.
    """
    missed = usage.prompt_tokens - usage.cached_tokens
    if not enabled:
        return {"type": "unavailable", "cache_missed_tokens": missed, "reason": None}
    previous = memory.recall(tenant, comparison_id, sections)
    if previous is None:
        return {
            "type": "comparison_response_not_found",
            "cache_missed_tokens": missed,
            "reason": None,
        }
    found = compare(previous, sections)
    reusable = max(usage.cached_tokens, int(found.shared * usage.prompt_tokens))
    lost = _lost(found, usage)
    if found.changed is None and not lost:
        return {
            "type": "cache_hit",
            "cache_missed_tokens": missed,
            "reason": None,
            "comparison_reusable_tokens": reusable,
        }
    return {
        "type": "cache_miss",
        "cache_missed_tokens": missed,
        "reason": found.changed or "not_resident",
        "comparison_reusable_tokens": reusable,
    }


_SLACK = 0.5
"""What was shared is estimated by characters: only where less than half was found it is a loss."""


def _lost(found: Comparison, usage: Usage) -> int:
    """Tokens that the earlier prompt had and that were not found, where that is beyond doubt."""
    expected = int(found.shared * usage.prompt_tokens)
    return expected - usage.cached_tokens if usage.cached_tokens < _SLACK * expected else 0
