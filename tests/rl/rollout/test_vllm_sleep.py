"""What sleeps is woken exactly once: the driver refuses memory that is already there (seen with vLLM 0.22.1 on a
GPU).
"""

import pytest

from terrella.rl.rollout.vllm_local import LocalVllm

PARTS = {"weights", "kv_cache"}


class Driver:
    """The memory of an engine with sleep mode, as strict as CUDA's."""

    def __init__(self) -> None:
        self.mapped = set(PARTS)

    def sleep(self, level: int) -> None:
        assert self.mapped == PARTS, "unmapped twice"
        self.mapped.clear()

    def wake_up(self, tags: list[str] | None = None) -> None:
        woken = PARTS if tags is None else set(tags)
        assert not woken & self.mapped, f"mapped twice: {woken & self.mapped}"
        self.mapped |= woken

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def sampler() -> LocalVllm:
    made = LocalVllm.__new__(LocalVllm)
    made.llm, made.asleep, made.version = Driver(), [], 0
    return made


def test_weights_have_room_before_the_cache_and_each_is_mapped_once(sampler) -> None:
    for version in (1, 2):
        sampler.sleep(2)
        assert sampler.llm.mapped == set() and sampler.version is None
        sampler.accept(None, 1.0)
        assert sampler.llm.mapped == {"weights"}
        sampler.accept(None, 1.0)  # the sync failed and is tried again
        sampler.accept(version, 1.0)
        sampler.wake()
        assert sampler.llm.mapped == PARTS and sampler.version == version
        sampler.wake()


def test_a_light_sleeper_wakes_whole(sampler) -> None:
    sampler.sleep(1)
    sampler.sleep(1)
    assert sampler.version == 0
    sampler.wake()
    assert sampler.llm.mapped == PARTS
