"""Weight sync without vLLM: the receiver in a plain object, damage on every transport, retries, and streams that
stay in step.
"""

import threading

import pytest
import torch

from terrella.core.errors import SyncError
from terrella.rl.sync.direct_load import joined, plan_copies
from terrella.rl.sync.flat_buffer import checksum, checksums, flatten, view
from terrella.rl.sync.publish import publish, send_again
from terrella.rl.sync.shared_memory import Shared, open_shared
from terrella.rl.sync.transports import BroadcastTransport, DiskTransport, IpcTransport, buckets
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.rl.sync.sync_targets import Engine, Worker

WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "d": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
}


def holds(engine: Engine, weights=WEIGHTS) -> bool:
    return engine.worker.loaded.keys() == weights.keys() and all(
        torch.equal(engine.worker.loaded[n], t) for n, t in weights.items()
    )


def transports(tmp_path):
    return {
        "disk": DiskTransport(tmp_path, shard_bytes=100),
        "broadcast": BroadcastTransport(bucket_bytes=100),
        "ipc": IpcTransport(bucket_bytes=100),
    }


@pytest.mark.parametrize("kind", ["disk", "broadcast", "ipc"])
def test_weights_arrive_exactly_and_carry_their_version(kind, tmp_path) -> None:
    engines = [Engine("one"), Engine("two")]
    transport = transports(tmp_path)[kind]
    for version in (3, 4):
        report = publish(transport, engines, lambda: WEIGHTS.items(), version, timeout_s=120)
        assert (report.version, report.attempts, report.tensors) == (version, 1, 4)
        assert all(
            holds(e) and e.version == version and e.worker.terrella_state()["version"] == version for e in engines
        )
    assert engines[0].resets == 2


def test_the_version_just_sent_stays_where_a_killed_start_had_gone_further(tmp_path) -> None:
    transport, engine = DiskTransport(tmp_path), Engine("one")
    for version in (48, 49, 50, 41, 42):  # killed after 50, and gone on with from 40
        publish(transport, [engine], lambda: WEIGHTS.items(), version, timeout_s=120)
        assert transport.path(version).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000041", "version-00000042"]


@pytest.mark.parametrize("kind", ["disk", "broadcast", "ipc"])
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

    def all_seen(flat: torch.Tensor, entries) -> list[str]:
        return [
            found if e["shape"] != [40, 30] else seen(view(flat, e))
            for e, found in zip(entries, checksums(flat, entries), strict=True)
        ]

    monkeypatch.setattr(receiver, "checksum", seen)
    monkeypatch.setattr(receiver, "checksums", all_seen)
    engine, transport = Engine(), transports(tmp_path)[kind]
    assert publish(transport, [engine], lambda: WEIGHTS.items(), 5, timeout_s=120).attempts == 3
    damage[0] = 99
    with pytest.raises(SyncError, match="version 6 failed 3 times: engine, worker 0: tensor d arrived damaged"):
        publish(transport, [engine], lambda: WEIGHTS.items(), 6, timeout_s=120)
    assert engine.version is None and engine.worker.terrella_state()["version"] is None
    damage[0] = 0
    publish(transport, [engine], lambda: WEIGHTS.items(), 7, timeout_s=120)
    assert holds(engine) and engine.version == 7


def test_a_target_that_fails_is_named_and_other_ranks_stay_in_step(tmp_path) -> None:
    """Two trainer ranks: one sends, both must go through every stream to its end, on every attempt."""
    engine = Engine("http://gone")
    engine.call = lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionRefusedError("refused"))
    read = {0: 0, 1: 0}
    box, barrier = [None, None], threading.Barrier(2, timeout=120)
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
            publish(BroadcastTransport(), [engine], weights, 1, timeout_s=5, sends=number == 0, gather=gather)
        except SyncError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join(300) for t in threads]
    assert read == {0: 12, 1: 12} and "refused" in errors[0] and errors[0] == errors[1]


@pytest.mark.parametrize("moment", ["terrella_state", "terrella_receive", "accept"])
def test_a_target_lost_while_it_is_sent_to_is_mended_before_the_next_attempt(moment: str) -> None:
    """Before the group is built, in the middle of a send, and after the last tensor."""
    engine, transport, mended = Engine("http://lost"), BroadcastTransport(), []
    call, accept, lost = engine.call, engine.accept, []

    def fails(method: str) -> None:
        if method == moment and not mended:
            lost.append(method)
        if lost and not mended:
            raise ConnectionResetError("the server is gone")

    def revive() -> None:
        if lost and not mended:
            mended.append(True)
            transport.close()

    engine.call = lambda method, *args, timeout_s: fails(method) or call(method, *args, timeout_s=timeout_s)
    engine.accept = lambda version, timeout_s: (version is not None and fails("accept")) or accept(version, timeout_s)
    report = publish(transport, [engine], lambda: WEIGHTS.items(), 3, timeout_s=5, revive=revive)
    assert report.attempts == 2 and lost == [moment] and holds(engine) and engine.version == 3


def test_after_a_target_was_sent_its_weights_again_the_group_of_all_is_built_anew() -> None:
    """The old group has the worker that is gone: a send through it would fail, and cost an attempt."""
    engines, transport = [Engine("http://one"), Engine("http://other")], BroadcastTransport()
    assert publish(transport, engines, lambda: WEIGHTS.items(), 1, timeout_s=20).attempts == 1
    assert transport.group is not None
    engines[1].worker, engines[1].version = Worker(), None  # it was started again
    alone = BroadcastTransport()
    send_again(transport, alone, engines[1], lambda: WEIGHTS.items(), 1, 20)
    assert transport.group is None and holds(engines[1]) and engines[1].version == 1
    assert publish(transport, engines, lambda: WEIGHTS.items(), 2, timeout_s=20).attempts == 1
    assert [engine.version for engine in engines] == [2, 2] and all(map(holds, engines))


def test_a_target_is_sent_again_what_lies_on_disk(tmp_path) -> None:
    engine, transport = Engine(), DiskTransport(tmp_path)
    publish(transport, [engine], lambda: WEIGHTS.items(), 4, timeout_s=20)
    engine.worker, engine.version = Worker(), None
    send_again(transport, BroadcastTransport(), engine, dict, 4, 20)  # no weights are asked of the trainer
    assert holds(engine) and engine.version == 4


def test_checksum_sees_every_bit_and_the_order() -> None:
    base = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    seen = {
        checksum(base),
        checksum(base.roll(1)),
        checksum(base[:-1]),
        checksum(base.to(torch.bfloat16)),
        checksum(base.view(10, 100)),
    }
    for place in (0, 500, 999):
        changed = base.clone()
        changed.view(torch.int32)[place] ^= 1 << 30
        seen.add(checksum(changed))
    rows = base.clone()  # two whole rows of the buffer change places
    rows[:256], rows[256:512] = base[256:512].clone(), base[:256].clone()
    seen.add(checksum(rows))
    assert len(seen) == 9 and checksum(base) == checksum(base.clone())
    assert checksum(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)) != checksum(
        torch.tensor([1, 2, 3, 4, 6], dtype=torch.uint8)
    )
    big = torch.zeros((1 << 28) + 4096, dtype=torch.uint8)  # more than one chunk
    before = checksum(big)
    big[-1] = 1
    assert checksum(big) != before


def test_a_buffer_holds_its_tensors_and_names_the_damaged_one() -> None:
    tensors = [*WEIGHTS.items(), ("scalar", torch.tensor(3.5)), ("empty", torch.empty(0, 4))]
    flat, entries = flatten(tensors)
    assert all(torch.equal(view(flat, e), tensor) for e, (_, tensor) in zip(entries, tensors, strict=True))
    before = checksums(flat, entries)
    for number, (entry, (_, tensor)) in enumerate(zip(entries, tensors, strict=True)):
        if tensor.numel():
            flat[entry["offset"]] ^= 128
            after = checksums(flat, entries)
            assert [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y] == [number]
            flat[entry["offset"]] ^= 128


def test_shared_memory_is_read_without_a_copy_and_goes_away() -> None:
    memory = Shared(torch.arange(64, dtype=torch.uint8))
    handle = memory.handle()
    assert torch.equal(open_shared(handle), torch.arange(64, dtype=torch.uint8))
    memory.close()
    with pytest.raises((FileNotFoundError, RuntimeError)):
        open_shared(handle)


PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def sent(**shapes) -> list:
    return [
        {"name": name.replace("__", "."), "dtype": "float32", "shape": list(shape), "offset": 0}
        for name, shape in shapes.items()
    ]


def test_a_model_of_joined_linears_is_filled_straight() -> None:
    shapes = {
        "m.0.a.qkv_proj.weight": (8, 3),
        "m.0.a.qkv_proj.bias": (8,),
        "m.embed_tokens.weight": (8, 3),
        "m.norm.weight": (3,),
    }
    order = {"v_proj": (2, 3), "q_proj": (4, 3), "k_proj": (2, 3)}
    entries = sent(m__embed_tokens__weight=(5, 3), m__norm__weight=(3,))
    for part, shape in order.items():
        entries += sent(**{f"m__0__a__{part}__weight": shape, f"m__0__a__{part}__bias": shape[:1]})
    plan = plan_copies(entries, shapes, PARTS)
    assert plan is not None
    tensors = {e["name"]: torch.randn(e["shape"]) for e in entries}
    whole = dict(joined(tensors.items(), plan))
    assert {name: tuple(t.shape) for name, t in whole.items()} == shapes
    expected = torch.cat([tensors[f"m.0.a.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(whole["m.0.a.qkv_proj.weight"], expected)
    assert (
        torch.equal(whole["m.embed_tokens.weight"][:5], tensors["m.embed_tokens.weight"])
        and not whole["m.embed_tokens.weight"][5:].any()
    )
    assert plan_copies(entries[:-1], shapes, PARTS) is None  # a part is missing
    assert plan_copies(entries, shapes | {"m.more.weight": (1,)}, PARTS) is None  # a parameter nobody fills
    assert plan_copies(entries, shapes | {"m.norm.weight": (4,)}, PARTS) is None  # another shape


def test_buckets_keep_order_and_limits() -> None:
    found = list(buckets(WEIGHTS.items(), 100))
    assert [[name for name, _ in bucket] for bucket in found] == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(
    ("world", "parallel", "kind", "kv_heads"),
    [
        (4, {"tensor": 2}, "dense", 4),
        (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}, "dense", 4),
        (4, {"tensor": 2, "sequence_parallel": True, "expert": 2}, "moe", 4),
        (4, {"tensor": 4}, "dense", 2),  # a rank holds queries alone, or the rest of them with key and value
        (4, {"tensor": 2, "pipeline": 2}, "dense", 1),
    ],
    ids=["tp2_dp2", "tp2_pp2", "tp2_ep2", "tp4_kv2", "tp2_pp2_kv1"],
)
def test_ranks_send_what_they_hold_and_each_byte_once(world: int, parallel: dict, kind: str, kv_heads: int) -> None:
    job = "terrella.tests.rl.sync.sync_jobs:send_parts"
    found = run_ranks(job, world, parallel=parallel, kind=kind, kv_heads=kv_heads)
    assert all(rank["same"] for rank in found) and found[0]["version"] == [2, 2]
    payload, sent = found[0]["payload"], [rank["sent"] for rank in found]
    assert payload <= sum(sent) <= 1.1 * payload
    assert sum(s > 0 for s in sent) > 1 and max(sent) <= 0.75 * payload  # nobody sends for all
