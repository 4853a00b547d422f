"""When the continuous batch proposes tokens by copying, and how many: decided by counts from the same call, never by
the clock, so that a run is reproducible.
"""

from __future__ import annotations

import torch

from ...kernels.copying import AHEAD
from ...models.config import ModelConfig
from .decode_step import COPIES

MOST_TOKENS = 16384  # of one pass, so that its logits stay within a few gigabytes
WORTH = 1.15  # tokens a pass makes, times what a plain step costs less, before copying stays on
DEAREST = 2.5  # times a plain step: a pass that costs more is not tried, since short answers never repay the trial
TRIAL = 3  # passes that tell whether it pays
LONGEST_PAUSE = 16  # windows until it is tried again


def fixed_tokens(config: ModelConfig) -> float:
    """How many tokens' products take as long as a pass of none: about ten kernels a layer, and the rates of an H200."""
    c = config
    width = c.experts_per_token * c.expert_ffn if c.experts else c.ffn
    layer = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.hidden * width
    return (c.layers * 45e-6 + 300e-6) * 700e12 / (2 * (c.layers * layer + c.padded_vocab * c.hidden))


def copying_of(setting: int | None, config: ModelConfig, device: torch.device) -> Copying | None:
    """None where no row copies. A CPU's pass costs by the token, so that there it has to be asked for."""
    return None if setting == 0 or (setting is None and device.type != "cuda") else Copying(setting, config)


class Copying:
    """The choice for each window of one call. `setting` is the number of proposals, or None for what pays."""

    def __init__(self, setting: int | None, config: ModelConfig) -> None:
        self.setting, self.fixed = setting, fixed_tokens(config)
        self.most = AHEAD if setting is None else setting
        self.rate: float | None = None  # tokens a row made a pass, when it was last tried
        self.pause, self.next_pause = 0, 1  # windows

    def cost(self, rows: int, ahead: int) -> float:
        """A pass over the proposals too, times a plain step."""
        return (self.fixed + rows * (ahead + 1)) / (self.fixed + rows)

    def most_tokens(self, slots: int) -> int:
        """Tokens of the largest pass that it may choose for up to `slots` rows."""
        if self.setting is not None:
            return min(MOST_TOKENS, slots * (self.setting + 1))
        rows = max(8, min(slots, int(self.fixed * (DEAREST - 1) / (AHEAD // 2 + 1 - DEAREST))))
        return min(MOST_TOKENS, rows * (AHEAD + 1))

    def ahead(self, rows: int) -> int:
        """Proposals for the next window of so many rows; 0 makes it a plain one."""
        if self.setting is not None:
            return self.setting if rows * (self.setting + 1) <= MOST_TOKENS else 0
        if self.pause or self.cost(rows, AHEAD // 2) > DEAREST or rows * (AHEAD + 1) > MOST_TOKENS:
            return 0
        return AHEAD if self.cost(rows, AHEAD) <= 2 else AHEAD // 2

    def passes(self, left: int) -> int:
        """Passes of the next window, when no row has more than `left` tokens to make."""
        if self.rate is None:
            return min(TRIAL, left)
        return min(COPIES, left, max(1, round(left / self.rate)))

    def saw(self, rows: int, ahead: int, made: int, passes: int) -> None:
        """What a window of copies gave: tokens of all rows, and the passes in which they did not wait."""
        self.rate = made / max(1, passes)
        if self.setting is not None or self.rate >= WORTH * self.cost(rows, ahead):
            self.next_pause = 1
            return
        self.rate, self.pause = None, self.next_pause
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)

    def went_plain(self) -> None:
        """A plain window is over."""
        self.pause = max(0, self.pause - 1)
