"""What an engine serves: its model, where and how that runs, and text to tokens and back.

The part of the public face that only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from radixkv.config import EngineConfig
from radixkv.service.engine.boundaries import Cut, render_cut
from radixkv.service.engine.building import kv_dtype_of
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.grammar_compile import Grammars
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.prompting import Prompting
from radixkv.service.engine.runner import ModelRunner


class Served:
    """What can be asked of an Engine without asking its model; from any thread, never waits."""

    config: EngineConfig
    grammars: Grammars
    _model: LoadedModel
    _capacity: Capacity
    _core: EngineCore
    _prompting: Prompting

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model.name

    @property
    def model_path(self) -> Path | None:
        """The directory the weights came from; None for a model built in memory."""
        return self._model.path

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that a request may have."""
        return self._capacity.max_model_len

    @property
    def bytes_per_block(self) -> int:
        """What a KV block takes of the device's memory."""
        return ModelRunner.bytes_per_block(
            self._model, self.config.block_size, kv_dtype_of(self.config)
        )

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.vocab_size

    @property
    def dtype(self) -> str:
        """The dtype that is computed in."""
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The device that computes."""
        return str(self._model.device)

    @property
    def decoder(self) -> Literal["native", "generic"]:
        """What runs the model: ``native``, the compiled decoder, or ``generic``, transformers."""
        return "generic" if self._model.decoder is None else "native"

    @property
    def decoder_in_words(self) -> str:
        """What runs the model, and if it is not the compiled decoder, why."""
        if self._model.decoder is not None:
            kept = " and keeps every bit, whatever is cached" if self.config.deterministic else ""
            return f"the compiled decoder{kept}"
        return f"transformers' layers, not the compiled decoder: {self._model.generic_reason}"

    @property
    def alive(self) -> bool:
        """Whether the engine thread still makes steps."""
        return self._core.alive

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, if something did."""
        return self._core.failure

    # ---- text and tokens ------------------------------------------------------------------------

    @property
    def prompting(self) -> Prompting:
        """What turns chats and text into tokens, and shows how."""
        return self._prompting

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Turn a chat into token ids with the model's template; raises InvalidRequest."""
        return self._prompting.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )

    def render_cut(
        self, messages: Sequence[Mapping[str, Any]], cuts: Sequence[Cut], **rendering: Any
    ) -> tuple[list[int], list[int]]:
        """Render a chat, and count the tokens that come before each of ``cuts`` (boundaries.py)."""
        return render_cut(self._prompting, messages, cuts, **rendering)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids."""
        return self._prompting.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens included."""
        self._prompting.check_ids(token_ids, "tokens")
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text)
