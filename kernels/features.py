"""What a model may ask of attention beyond plain causal softmax; knows names, no arithmetic."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The options of one attention call, as the backends take them.

    scale           multiplies q . k
    sliding_window  key j is visible to query i iff 0 <= i - j < sliding_window; None: no limit
    soft_cap        scores become cap * tanh(score / cap), before the mask and ALiBi
    sinks           [num_q_heads] a logit per head that takes part in the softmax and has no value
    alibi_slopes    [num_q_heads] adds slope * (j - i) to the score
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scores need nothing but the scale and a mask."""
        return self.soft_cap is None and self.sinks is None and self.alibi_slopes is None

    def first_visible(self, position: int) -> int:
        """The first key position that a query at ``position`` sees."""
        if self.sliding_window is None:
            return 0
        return max(0, position - self.sliding_window + 1)
