"""The way to ask an engine for a beam search; comes down to ``submit`` like all others."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.service.engine.asking import Asking
from radixkv.service.engine.beams import BeamParams, EarlyStopping
from radixkv.service.engine.params import Choice, Generation, Usage
from radixkv.service.engine.stream import Stream


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The answers of ``Engine.beam_search``, the best first, and what they cost."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    beams: tuple[Choice, ...]
    """With ``cumulative_logprob`` and ``score``."""
    usage: Usage
    """The prompt once, and the tokens of the answers returned."""
    num_steps: int
    copied_blocks: int
    """Blocks begun by copying, because a beam was to write into one that others hold too."""
    copied_bytes: int
    most_copied_blocks: int
    """Of a single step; at most the beam width."""

    @property
    def text(self) -> str:
        """The text of the best answer."""
        return self.beams[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the best answer, without what ended it."""
        return self.beams[0].token_ids


class BeamAsking(Asking, ABC):
    """What an Engine can be asked, and beam search."""

    def beam_search(
        self,
        prompt: str | Sequence[int],
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **sampling: Any,
    ) -> BeamResult:
        """Search for the likeliest answers to ``prompt`` (text or token ids) and wait for them.

        The parameters mean what they mean in transformers' ``generate(num_beams=...)``, and in
        float32 ids and scores are the same. ``sampling`` are fields of SamplingParams that do not
        change probabilities (``n``, by default all beams; ``min_tokens``, ``stop_token_ids``,
        ``ignore_eos``, ``logprobs``) and fields of Origin. Raises what ``submit`` raises.
        """
        stream = self._search(
            prompt, BeamParams(beam_width, length_penalty, early_stopping), max_tokens, sampling
        )
        return self._found(stream, stream.result())

    async def abeam_search(
        self,
        prompt: str | Sequence[int],
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **sampling: Any,
    ) -> BeamResult:
        """Search without blocking the event loop; cancelling it aborts the request."""
        stream = self._search(
            prompt, BeamParams(beam_width, length_penalty, early_stopping), max_tokens, sampling
        )
        return self._found(stream, await stream.aresult())

    def _search(
        self,
        prompt: str | Sequence[int],
        beams: BeamParams,
        max_tokens: int | None,
        sampling: dict[str, Any],
    ) -> Stream:
        asked = {"n": beams.width, "temperature": 0.0, "max_tokens": max_tokens, "beams": beams}
        return self._start(prompt, asked | sampling)

    def _found(self, stream: Stream, answer: Generation) -> BeamResult:
        group = stream.beams
        assert group is not None, "a search has beams once it has been submitted"
        return BeamResult(
            request_id=answer.request_id,
            prompt_token_ids=answer.prompt_token_ids,
            beams=answer.choices,
            usage=answer.usage,
            num_steps=group.num_steps,
            copied_blocks=group.copied_blocks,
            copied_bytes=group.copied_tokens * self.bytes_per_block // self.config.block_size,
            most_copied_blocks=group.most_copied,
        )
