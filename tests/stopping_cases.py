"""Small tokenizers and a driver, for the tests of how choices end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.params import Choice, Delta, SamplingParams
from radixkv.service.engine.sampling import SampledToken
from radixkv.service.engine.stopping import ChoiceStream
from tests.tiny_models import build_tokenizer

EOS = 2
BYTES = TokenText(build_tokenizer())


def with_byte_fallback() -> TokenText:
    words = ["<s>", "</s>", "<eos>", "▁the", "th", "a", "ab", "b", "▁"]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(words[:3])
    return TokenText(
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, clean_up_tokenization_spaces=False
        )
    )


FALLBACK = with_byte_fallback()
_OF_BYTE = {
    raw[0]: i for i in range(3, 259) if len(raw := BYTES.token_bytes(i)) == 1
}  # the tiny tokenizer's

AND = next(i for i in range(259, 400) if BYTES.token_bytes(i) == b" and")


def spell(text: str) -> list[int]:
    """One token a byte."""
    return [_OF_BYTE[b] for b in text.encode()]


def stream(text: TokenText = BYTES, max_tokens: int = 100, **params: Any) -> ChoiceStream:
    return ChoiceStream(
        0, SamplingParams(**params), text, eos_token_ids=(EOS,), max_tokens=max_tokens
    )


def run(
    choice: ChoiceStream, token_ids: Sequence[int], end: Any = "length"
) -> tuple[list[Delta | None], Choice]:
    """Push tokens until the choice has finished, or end it."""
    deltas: list[Delta | None] = []
    for token_id in token_ids:
        deltas.append(choice.push(SampledToken(token_id, -1.0, ((token_id, -1.0),))))
        if choice.finished:
            break
    else:
        deltas.append(choice.end(end))
    return deltas, choice.choice()


def said(deltas: Sequence[Delta | None]) -> list[str]:
    return [delta.text if delta else "" for delta in deltas]
