"""What draws the tokens of a choice and what writes them out, as the model served has them.

Knows the model's vocabulary, its ends and how its tokens read; nothing of blocks or of turns.
"""

from __future__ import annotations

from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.request import Request
from radixkv.service.engine.sampling import ChoiceSampler
from radixkv.service.engine.stopping import ChoiceStream


class Choices:
    """Makes the choices of an engine's requests; may be called from any thread."""

    def __init__(self, model: LoadedModel, token_text: TokenText) -> None:
        self._model = model
        self._token_text = token_text

    def __call__(self, request: Request, index: int) -> tuple[ChoiceSampler, ChoiceStream]:
        """Return sampler and output of choice ``index``; of the first those it has already.

        Raises InvalidRequest for parameters that do not fit the model.
        """
        if index == 0 and request.first_choice is not None:
            return request.first_choice
        eos = self._model.eos_token_ids
        sampler = ChoiceSampler(
            request.params,
            index=index,
            prompt_ids=request.sampling_prompt,
            vocab_size=self._model.vocab_size,
            eos_token_ids=eos,
            entropy=request.entropy,
            grammar=request.grammar,
        )
        output = ChoiceStream(
            index,
            request.params,
            self._token_text,
            eos_token_ids=eos,
            max_tokens=request.max_tokens,
        )
        return sampler, output
