"""Weight sync without vLLM: the receiver in a plain object, damage on every transport, retries, and streams that stay in step."""

import threading

import pytest
import torch

from terrella.core.errors import SyncError
from terrella.rl.sync.checksum import checksum
from terrella.rl.sync.publish import publish
from terrella.rl.sync.receiver import WeightReceiver
from terrella.rl.sync.transports import BroadcastTransport, DirectTransport, DiskTransport, buckets

WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "d": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
}


class Worker(WeightReceiver):
    """A worker whose model is a dict."""

    device, rank = torch.device("cpu"), 0

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.model_runner = self

    def reload_weights(self, weights_iterator) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


class Engine:
    """A target that calls its worker as vLLM would."""

    def __init__(self, name: str = "engine") -> None:
        self.name, self.worker, self.version, self.resets = name, Worker(), 0, 0

    def call(self, method, *args, timeout_s):
        return [getattr(self.worker, method)(*args)]

    def call_direct(self, method, weights, version):
        return [getattr(self.worker, method)(weights, version)]

    def accept(self, version, timeout_s) -> None:
        self.version = version
        self.resets += version is not None


def holds(engine: Engine, weights=WEIGHTS) -> bool:
    return engine.worker.loaded.keys() == weights.keys() and all(torch.equal(engine.worker.loaded[n], t) for n, t in weights.items())


def transports(tmp_path):
    return {
        "disk": DiskTransport(tmp_path, shard_bytes=100),
        "broadcast": BroadcastTransport(bucket_bytes=100),
        "direct": DirectTransport(),
    }


@pytest.mark.parametrize("kind", ["disk", "broadcast", "direct"])
def test_weights_arrive_exactly_and_carry_their_version(kind, tmp_path) -> None:
    engines = [Engine("one")] if kind == "direct" else [Engine("one"), Engine("two")]
    transport = transports(tmp_path)[kind]
    for version in (3, 4):
        report = publish(transport, engines, lambda: WEIGHTS.items(), version, timeout_s=20)
        assert (report.version, report.attempts, report.tensors) == (version, 1, 4)
        assert all(holds(e) and e.version == version and e.worker.terrella_state()["version"] == version for e in engines)
    assert engines[0].resets == 2


@pytest.mark.parametrize("kind", ["disk", "broadcast"])
def test_a_damaged_tensor_is_found_sent_again_and_then_named(kind, tmp_path, monkeypatch) -> None:
    """Damage in transit: what the receiver sees differs from what the sender described."""
    from terrella.rl.sync import receiver

    damage = [2]

    def seen(tensor: torch.Tensor) -> str:
        if tensor.shape == (40, 30) and damage[0]:
            damage[0] -= 1
            tensor = tensor.clone()
            tensor.view(torch.int32)[7, 7] ^= 1
        return checksum(tensor)

    monkeypatch.setattr(receiver, "checksum", seen)
    engine, transport = Engine(), transports(tmp_path)[kind]
    assert publish(transport, [engine], lambda: WEIGHTS.items(), 5, timeout_s=20).attempts == 3
    damage[0] = 99
    with pytest.raises(SyncError, match="version 6 failed 3 times: engine, worker 0: tensor d arrived damaged"):
        publish(transport, [engine], lambda: WEIGHTS.items(), 6, timeout_s=20)
    assert engine.version is None and engine.worker.terrella_state()["version"] is None
    damage[0] = 0
    publish(transport, [engine], lambda: WEIGHTS.items(), 7, timeout_s=20)
    assert holds(engine) and engine.version == 7


def test_a_target_that_fails_is_named_and_other_ranks_stay_in_step(tmp_path) -> None:
    """Two trainer ranks: one sends, both must go through every stream to its end, on every attempt."""
    engine = Engine("http://gone")
    engine.call = lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionRefusedError("refused"))
    read = {0: 0, 1: 0}
    box, barrier = [None, None], threading.Barrier(2, timeout=20)
    errors = {}

    def rank(number: int) -> None:
        def weights():
            for item in WEIGHTS.items():
                read[number] += 1
                yield item

        def gather(value):
            box[number] = value
            barrier.wait()
            values = list(box)
            barrier.wait()
            return values

        try:
            publish(BroadcastTransport(), [engine], weights, 1, timeout_s=5, speaks=number == 0, gather=gather)
        except SyncError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert read == {0: 12, 1: 12} and "refused" in errors[0] and errors[0] == errors[1]


def test_checksum_sees_every_bit_and_the_order() -> None:
    base = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    seen = {checksum(base), checksum(base.roll(1)), checksum(base[:-1]), checksum(base.to(torch.bfloat16))}
    for place in (0, 500, 999):
        changed = base.clone()
        changed.view(torch.int32)[place] ^= 1 << 30
        seen.add(checksum(changed))
    assert len(seen) == 7 and checksum(base) == checksum(base.clone())
    assert checksum(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)) != checksum(torch.tensor([1, 2, 3, 4, 6], dtype=torch.uint8))
    big = torch.zeros(1 << 23, dtype=torch.uint8)  # more than one chunk
    other = big.clone()
    other[-1] = 1
    assert checksum(big) != checksum(other)


def test_buckets_keep_order_and_limits() -> None:
    found = list(buckets(WEIGHTS.items(), 100))
    assert [[name for name, _ in bucket] for bucket in found] == [["a", "b", "c"], ["d"]]
