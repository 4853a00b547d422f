"""What a policy loss is: its settings, its per-token terms, and their definition in plain torch.

Shape suffixes: N rows (tokens), H hidden, V vocabulary (this rank's shard), D documents.

    loss = sum_t  ce_w * (-logp) + pg_w * policy(logp, old, A) + kl_w * KL(logp, ref) - ent_w * entropy

A weight is the factor of a token's term in the summed loss, normalisation included; token-mean, sequence-mean and
constant aggregation are choices of weights. Sequence objectives see a document as one action: its term is its policy
value times the sum of its tokens' `pg_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
import torch.distributed as dist

from .logprob import check_temperature

# exp stays finite in fp32; tokens past it get no policy gradient and are counted in `ratio_clamped`
MAX_LOG_RATIO = 20.0

OBJECTIVES = ("clip", "webrl_paper", "webrl_released")
RATIOS = ("token", "sequence")
KLS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token fp32 inputs of the loss; None means that the term is not used.

    Without `old_logprob` the step is on-policy: the ratio is 1 and its gradient that of the log-probability.
    """

    ce_weight: torch.Tensor | None = None
    pg_weight: torch.Tensor | None = None
    kl_weight: torch.Tensor | None = None
    entropy_weight: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    old_logprob: torch.Tensor | None = None
    ref_logprob: torch.Tensor | None = None

    def select(self, rows: torch.Tensor | slice) -> PolicyTerms:
        return replace(
            self, **{f.name: None if (v := getattr(self, f.name)) is None else v[rows] for f in fields(self)}
        )

    def active(self, like: torch.Tensor) -> torch.Tensor:
        """Rows with any weight; the others are never computed."""
        weights = [w for w in (self.ce_weight, self.pg_weight, self.kl_weight, self.entropy_weight) if w is not None]
        mask = torch.zeros_like(like, dtype=torch.bool)
        for weight in weights:
            mask = mask | (weight != 0)
        return mask


@dataclass(frozen=True)
class PolicySettings:
    """What the policy term is. `ratio="sequence"` is GSPO; the WebRL objectives are sequence regressions on A /
    beta.
    """

    temperature: float = 1.0
    objective: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bound on the loss of negative advantages, in units of -A; usually 3
    kl: str = "k3"
    kl_clamp: float | None = None
    beta: float = 1.0  # webrl_paper: the strength of the pull to the reference
    length_normalize: bool = True  # webrl_paper: mean rather than sum of the token log-ratios
    entropy: bool = True  # report the entropy even when it carries no weight

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        for name, allowed in (("objective", OBJECTIVES), ("ratio", RATIOS), ("kl", KLS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"PolicySettings.{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"PolicySettings.dual_clip must be above 1, not {self.dual_clip}")
        if self.objective == "webrl_paper" and not self.beta > 0:
            raise ValueError(f"PolicySettings.beta must be positive, not {self.beta}")

    @property
    def by_sequence(self) -> bool:
        return self.objective != "clip" or self.ratio == "sequence"


@dataclass
class PolicyOutput:
    """The loss, and what a report needs: detached per-token values (0 on rows without a weight) and sums over the
    rows.
    """

    loss: torch.Tensor
    logprob_N: torch.Tensor
    entropy_N: torch.Tensor | None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


SUM_NAMES = (
    "pg_loss",
    "ce_loss",
    "kl_loss",
    "entropy_loss",
    "tokens",
    "pg_tokens",
    "logprob",
    "entropy",
    "kl",
    "approx_kl",
    "ratio",
    "ratio_sq",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "ratio_clamped",
)


def check_terms(terms: PolicyTerms, settings: PolicySettings, rows: int, documents: Documents | None) -> None:
    """Missing or misshapen inputs, named."""
    for f in fields(terms):
        value = getattr(terms, f.name)
        if value is not None and value.shape != (rows,):
            raise ValueError(f"PolicyTerms.{f.name} has shape {tuple(value.shape)}, expected ({rows},)")
    if terms.pg_weight is not None and terms.advantage is None:
        raise ValueError("PolicyTerms.pg_weight is set but advantage is missing")
    if terms.kl_weight is not None and terms.ref_logprob is None:
        raise ValueError("PolicyTerms.kl_weight is set but ref_logprob is missing")
    if terms.pg_weight is not None and settings.by_sequence:
        if documents is None:
            raise ValueError("a sequence objective needs doc_N, the document index of every token")
        if settings.objective != "clip" and terms.ref_logprob is None:
            raise ValueError(f"PolicySettings.objective={settings.objective!r} needs PolicyTerms.ref_logprob")


def kl_estimate(logprob_N: torch.Tensor, ref_N: torch.Tensor, settings: PolicySettings) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference)."""
    gap_N = ref_N - logprob_N
    if settings.kl == "k1":
        kl_N = -gap_N
    elif settings.kl == "k2":
        kl_N = 0.5 * gap_N * gap_N
    else:
        # expm1 keeps the digits of exp(d) - 1 where the policies are close; the bound keeps its gradient finite under
        # kl_clamp
        kl_N = torch.expm1(gap_N.clamp(max=80.0)) - gap_N
    if settings.kl_clamp is not None:
        kl_N = kl_N.clamp(-settings.kl_clamp, settings.kl_clamp)
    return kl_N


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks that hold parts of the same documents. Every rank's loss depends on every rank's part, so
    gradients add up too.
    """

    @staticmethod
    def forward(ctx, value_D: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole_D = value_D.clone()
        dist.all_reduce(whole_D, group=group)
        return whole_D

    @staticmethod
    def backward(ctx, grad_D: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole_D = grad_D.clone()
        dist.all_reduce(whole_D, group=ctx.group)
        return whole_D, None


@dataclass
class Documents:
    """The documents that rows belong to; with context parallelism `group` holds the other rows of them."""

    index_N: torch.Tensor
    group: dist.ProcessGroup | None = None

    @cached_property
    def count(self) -> int:
        """Documents, counted on all ranks of the group."""
        last = self.index_N.max() if len(self.index_N) else self.index_N.new_full((), -1)
        if self.group is not None:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self.group)
        return int(last) + 1

    def sum(self, value_N: torch.Tensor) -> torch.Tensor:
        """Per document, over all of its rows."""
        sum_D = value_N.new_zeros(self.count).index_add(0, self.index_N, value_N)
        return sum_D if self.group is None else _SumOverRanks.apply(sum_D, self.group)  # type: ignore[return-value]

    def select(self, rows: torch.Tensor | slice) -> Documents:
        return Documents(self.index_N[rows], self.group)


def _clip_terms(ratio_N, advantage_N, settings):
    """(loss, clipped low, clipped high, dual clipped) of the clipped surrogate."""
    bound_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    plain_N, clipped_N = -advantage_N * ratio_N, -advantage_N * bound_N
    loss_N = torch.maximum(plain_N, clipped_N)
    active_N = clipped_N > plain_N
    low_N, high_N = active_N & (advantage_N < 0), active_N & (advantage_N > 0)
    dual_N = torch.zeros_like(low_N)
    if settings.dual_clip is not None:
        cap_N = -advantage_N * settings.dual_clip
        dual_N = (advantage_N < 0) & (loss_N > cap_N)
        loss_N = torch.where(dual_N, cap_N, loss_N)
    return loss_N, low_N, high_N, dual_N


def _webrl_terms(logprob_N, member_N, terms, settings, documents: Documents):
    """Per-token copy of its document's regression loss, paper's equation 6 or the released SmoothL1."""
    doc_N = documents.index_N
    count_D = documents.sum(member_N).clamp_min(1.0)
    ref_D = documents.sum(terms.ref_logprob * member_N)
    ratio_D = documents.sum(logprob_N * member_N) - ref_D
    advantage_D = documents.sum(terms.advantage * member_N) / count_D
    if settings.objective == "webrl_paper":
        log_ratio_D = ratio_D / count_D if settings.length_normalize else ratio_D
        return (settings.beta * log_ratio_D - advantage_D).square()[doc_N], log_ratio_D[doc_N]
    log_ratio_D = ratio_D / count_D
    # negatives are masked out, so the sign is all that is left of A
    positive_D = (advantage_D >= 0).to(logprob_N.dtype)
    beta_D = torch.where((ref_D / count_D).exp() >= 0.8, 5.0, 1.0).to(logprob_N.dtype)
    beta_D = torch.minimum(beta_D, 1.0 / log_ratio_D.detach().abs())
    loss_D = (
        torch.nn.functional.smooth_l1_loss(beta_D * log_ratio_D, torch.ones_like(log_ratio_D), reduction="none")
        / beta_D
    )
    return (positive_D * loss_D)[doc_N], log_ratio_D[doc_N]


def reference_policy_terms(
    logprob_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    terms: PolicyTerms,
    settings: PolicySettings,
    documents: Documents | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss and the report's sums from per-token log-probs and entropies; rows must all be active."""
    zero = logprob_N.new_zeros(())
    sums: dict[str, torch.Tensor] = dict.fromkeys(SUM_NAMES, zero)
    detached_N = logprob_N.detach()
    loss = logprob_N.sum() * 0.0 if len(logprob_N) == 0 else zero
    sums["tokens"] = zero + len(logprob_N)
    sums["logprob"] = detached_N.sum()
    if terms.ce_weight is not None:
        # where, not a product: a log-prob of -inf counts only where the token has a weight
        ce = -torch.where(terms.ce_weight != 0, terms.ce_weight * logprob_N, torch.zeros_like(logprob_N)).sum()
        loss, sums["ce_loss"] = loss + ce, ce.detach()
    spread = documents is not None and documents.group is not None  # then a rank without rows still answers the others
    if terms.pg_weight is not None and (len(logprob_N) or spread):
        member_N = terms.pg_weight != 0
        weight_N = torch.where(member_N, terms.pg_weight, zero)
        live_N = torch.where(member_N, logprob_N, torch.zeros_like(logprob_N))
        member_N = member_N.to(logprob_N.dtype)
        if settings.objective == "clip":
            old_N = (
                live_N.detach()
                if terms.old_logprob is None
                else torch.where(member_N > 0, terms.old_logprob, live_N.detach())
            )
            log_ratio_N = live_N - old_N
            if settings.ratio == "sequence":
                assert documents is not None  # check_terms
                count_D = documents.sum(member_N).clamp_min(1.0)
                log_ratio_N = (documents.sum(log_ratio_N * member_N) / count_D)[documents.index_N]
            ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            value_N, low_N, high_N, dual_N = _clip_terms(ratio_N, terms.advantage, settings)
            for name, hit_N in (("clipped_low", low_N), ("clipped_high", high_N), ("dual_clipped", dual_N)):
                sums[name] = (hit_N * member_N).sum()
            sums["approx_kl"] = ((old_N - detached_N) * member_N).sum()
        else:
            assert documents is not None  # check_terms
            value_N, log_ratio_N = _webrl_terms(live_N, member_N, terms, settings, documents)
            ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        pg = (weight_N * value_N).sum()
        loss, sums["pg_loss"] = loss + pg, pg.detach()
        ratio_N = ratio_N.detach() * member_N
        sums["pg_tokens"], sums["ratio"], sums["ratio_sq"] = member_N.sum(), ratio_N.sum(), ratio_N.square().sum()
        sums["ratio_clamped"] = ((log_ratio_N.detach().abs() > MAX_LOG_RATIO) * member_N).sum()
    if terms.kl_weight is not None:
        assert terms.ref_logprob is not None  # check_terms
        member_N = terms.kl_weight != 0
        ref_N = torch.where(member_N, terms.ref_logprob, detached_N)
        kl_N = torch.where(member_N, kl_estimate(logprob_N, ref_N, settings), torch.zeros_like(logprob_N))
        kl = (terms.kl_weight * kl_N).sum()
        loss, sums["kl_loss"], sums["kl"] = loss + kl, kl.detach(), kl_N.detach().sum()
    if entropy_N is not None:
        sums["entropy"] = entropy_N.detach().sum()
        if terms.entropy_weight is not None:
            bonus = (terms.entropy_weight * entropy_N).sum()
            loss, sums["entropy_loss"] = loss - bonus, -bonus.detach()
    return loss, sums
