"""From what people write to token ids, once and in one way, so that equal prompts share blocks.

Knows the tokenizer and its chat template; nothing of models or caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from radixkv.errors import InvalidRequest


class Prompting:
    """Renders chats and tokenizes text. Stateless, so any thread may use it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.bos_token_id: int | None = tokenizer.bos_token_id

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Write the chat out with the model's template; ``tools`` as they are, in their order.

        Raises InvalidRequest if there is no template or the template refuses these messages.
        """
        if not messages:
            raise InvalidRequest("messages is empty; wanted at least one", param="messages")
        if not self.has_template:
            raise InvalidRequest(
                "this model's tokenizer has no chat template; use completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=[dict(tool) for tool in tools] if tools else None,
                **(template_kwargs or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        assert isinstance(text, str)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Write the chat out and tokenize it; the template brings its own special tokens."""
        return self.tokenize(self.render_text(messages, **kwargs), add_special_tokens=False)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize ``text``. Text that already begins with the BOS token gets no second one, so a
        rendered chat sent as a plain prompt has the same ids as the chat (TEMPLATE-4)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included; halves of characters are left out."""
        text = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text).strip("\ufffd")

    def offset(self, text: str, token_ids: Sequence[int], at: int) -> int:
        """Return the character of ``text`` at which token ``at`` of it begins."""
        if self._tokenizer.is_fast:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = found["offset_mapping"]
            return int(offsets[at][0]) if at < len(offsets) else len(text)
        return min(len(self.text_of(token_ids[:at])), len(text))

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest unless there are ids and all are in the vocabulary."""
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens; wanted at least one", param=param)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(
                f"{param} has token id {low if low < 0 else high}; "
                f"this model's ids are 0 to {self._vocab_size - 1}",
                param=param,
            )
