"""The adapters of the benchmark of ragged answers, in a rank of the pool."""

from terrella.benchmarks.ragged import adapted
from terrella.benchmarks.rollout import TINY


def merges() -> list[bool]:
    """Whether weights were merged for a first version, again for the same, and for the next."""
    versions, found = [0], []
    weights = adapted(TINY, versions)
    merged = weights()["decoder.layers.0.self_attention.linear_qkv.weight"]
    for versions[0] in (1, 1, 2):
        merged.fill_(7.0)  # a merge writes over it
        weights()
        found.append(bool((merged != 7.0).any()))
    return found
