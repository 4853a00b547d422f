"""What a text may go on with: the tokens that followed an earlier place which ends like its end.

Shape suffixes: B rows, L room for their tokens, K tokens to feed.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton

LONGEST = 16  # tokens of the end that are compared
SURE = 2  # a match of fewer says less than the place where the last copy would go on
AHEAD = 15  # tokens proposed at most


def reference_propose(
    text_BL: torch.Tensor, length_B: torch.Tensor, source_B: torch.Tensor, ahead: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch."""
    room = text_BL.shape[1]
    place_L = torch.arange(room, device=text_BL.device)
    same_BL = place_L < length_B[:, None]
    score_BL = torch.zeros_like(text_BL, dtype=torch.int64)
    for back in range(min(LONGEST, room)):
        end_B1 = text_BL.gather(1, (length_B - back).clamp_min(0)[:, None])
        shifted_BL = text_BL.roll(back, 1)
        same_BL = same_BL & (shifted_BL == end_B1) & (place_L >= back) & (length_B >= back)[:, None]
        score_BL += same_BL
    rank_BL = torch.where(place_L < length_B[:, None], score_BL * room + place_L, -1)
    best_B = rank_BL.amax(1)
    at_B = torch.where(best_B < 0, -1, best_B % room)
    at_B = torch.where((best_B < SURE * room) & (source_B < length_B), source_B, at_B)
    step_K = torch.arange(ahead + 1, device=text_BL.device)
    # a copy that reaches the text's end begins again, as a text that repeats itself does
    index_BK = at_B[:, None] + 1 + (step_K - 1) % (length_B - at_B)[:, None]
    index_BK = torch.where(step_K == 0, length_B[:, None], index_BK)
    return text_BL.gather(1, index_BK).long(), at_B


def propose(
    text_BL: torch.Tensor, length_B: torch.Tensor, source_B: torch.Tensor, ahead: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the token at `length` and `ahead` proposals for those behind it, the place they were copied from, -1 for none).

    Of the earlier places that end like the text does, the longest match counts, and the newest of equals; where even
    that is short, the copy goes on behind `source_B`, a place below `length_B`. `text_BL` is int32.
    """
    if use_triton(text_BL):
        from .triton.copying import triton_propose

        return triton_propose(text_BL, length_B, source_B, ahead, longest=LONGEST, sure=SURE)
    return reference_propose(text_BL, length_B, source_B, ahead)
