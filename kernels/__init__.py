"""Triton kernels beside their plain-torch references; every op picks by device. Imports torch and triton only."""

from .advantage import bilevel_gae, gae, group_advantage, variance_filter
from .linear_logprob import linear_logprob
from .logprob import token_logprob
from .policy_loss import PolicyOutput, PolicySettings, PolicyTerms, linear_policy_loss

__all__ = [
    "PolicyOutput",
    "PolicySettings",
    "PolicyTerms",
    "bilevel_gae",
    "gae",
    "group_advantage",
    "linear_logprob",
    "linear_policy_loss",
    "token_logprob",
    "variance_filter",
]
