"""Each sample exactly once an epoch, whatever the layout, the ranks, the workers, and wherever it stops and resumes."""

import itertools
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError
from terrella.data.shards import Reader, ReaderState, ShardSet, ShardWriter, ShuffledOrder, merge_states


def write_layout(folder: Path, counts: list[int], first: int = 0) -> Path:
    number = first
    for shard, count in enumerate(counts):
        with ShardWriter(folder, prefix=f"s{shard:02d}") as writer:
            for _ in range(count):
                writer.write({"n.json": number}, key=f"k{number:05d}")
                number += 1
    return folder


@pytest.fixture(scope="module")
def folders():
    """Real shards of each layout, written once."""
    made: dict[tuple, Path] = {}
    root = Path(tempfile.mkdtemp())

    def get(counts: tuple[int, ...]) -> Path:
        if counts not in made:
            made[counts] = write_layout(root / str(len(made)), list(counts))
        return made[counts]

    yield get
    shutil.rmtree(root)


def numbers(reader, count=None):
    return [s["n.json"] for s in itertools.islice(iter(reader), count)]


layouts = st.lists(st.integers(1, 23), min_size=1, max_size=6).map(tuple)
NO_CHECKS = [HealthCheck.function_scoped_fixture]


@given(layouts, st.data(), st.integers(0, 3), st.integers(0, 4), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=NO_CHECKS)
def test_stop_anywhere_resume_with_other_ranks(folders, counts, data, seed, window, shuffle):
    shards = ShardSet(folders(counts))
    total, epochs = sum(counts), 2
    seen: list[int] = []
    state = None
    for _ in range(data.draw(st.integers(0, 3), label="stops")):
        ranks = data.draw(st.integers(1, 8), label="ranks")
        readers = [
            Reader(
                shards,
                ShuffledOrder(counts, seed=seed, window=window, shuffle=shuffle),
                rank=r,
                ranks=ranks,
                state=state,
                epochs=epochs,
            )
            for r in range(ranks)
        ]
        for reader in readers:
            seen += numbers(reader, data.draw(st.integers(0, total // 2), label="take"))
        state = merge_states([r.state() for r in readers]).to_json()
    ranks = data.draw(st.integers(1, 8), label="last ranks")
    for r in range(ranks):
        order = ShuffledOrder(counts, seed=seed, window=window, shuffle=shuffle)
        seen += numbers(Reader(shards, order, rank=r, ranks=ranks, state=state, epochs=epochs))
    assert Counter(seen) == dict.fromkeys(range(total), epochs)


@given(layouts, st.integers(1, 8), st.integers(1, 8), st.integers(0, 40), st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=NO_CHECKS)
def test_ranks_in_step_keep_one_global_order(folders, counts, ranks, later_ranks, steps, seed):
    """Interleaved, the ranks give the order of a single reader, before and after a resume under another number of
    ranks.
    """
    shards = ShardSet(folders(counts))

    def order():
        return ShuffledOrder(counts, seed=seed, window=2)

    whole = steps * ranks + 20 * later_ranks
    expected = order().ids(np.arange(whole)).tolist()
    first = [Reader(shards, order(), rank=r, ranks=ranks) for r in range(ranks)]
    taken = [numbers(r, steps) for r in first]
    got = [x for step in zip(*taken) for x in step]
    state = first[0].state_in_step()
    assert state == merge_states([r.state() for r in first]) and state.ahead == ()
    assert len(state.to_json()) < 200 and state.position == steps * ranks
    second = [numbers(Reader(shards, order(), rank=r, ranks=later_ranks, state=state), 20) for r in range(later_ranks)]
    got += [x for step in zip(*second) for x in step]
    assert got == expected
    for epoch in range(whole // sum(counts)):
        assert sorted(expected[epoch * sum(counts) : (epoch + 1) * sum(counts)]) == list(range(sum(counts)))


def stop_and_resume(folders, data):
    """Real worker processes: stop anywhere, go on with other ranks and workers; the order is that of one process
    without workers.
    """
    counts = (23, 7, 150, 1, 60)
    shards = ShardSet(folders(counts))
    whole, state, step = [], None, 0
    for _ in range(2):
        ranks, workers = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 3))
        take = data.draw(st.integers(0, 120 // ranks))
        readers = [
            Reader(shards, ShuffledOrder(counts, seed=5), rank=r, ranks=ranks, workers=workers, state=state)
            for r in range(ranks)
        ]
        taken = [numbers(reader, take) if r in (0, ranks - 1) else None for r, reader in enumerate(readers)]
        expected = ShuffledOrder(counts, seed=5).ids(np.arange(step, step + take * ranks)).reshape(take, ranks)
        for r in (0, ranks - 1):
            assert taken[r] == expected[:, r].tolist() and readers[r].taken == take
        whole += expected.reshape(-1).tolist()
        step += take * ranks
        state = readers[0].state_in_step().to_json()
        assert ReaderState.from_json(state).position == step
    assert whole == ShuffledOrder(counts, seed=5).ids(np.arange(step)).tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@given(st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=NO_CHECKS)
def test_workers_change_nothing(folders, data):
    stop_and_resume(folders, data)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=NO_CHECKS)
def test_workers_change_nothing_at_length(folders, data):
    stop_and_resume(folders, data)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_end_with_the_epoch(folders):
    counts = (23, 7, 150)
    shards = ShardSet(folders(counts))

    def reader(workers):
        return Reader(shards, ShuffledOrder(counts, seed=5), rank=1, ranks=2, workers=workers, epochs=2)

    assert numbers(reader(3)) == numbers(reader(0))


PINNED = [3, 10, 9, 11, 0, 1, 4, 8, 2, 5, 7, 6, 2, 11]


def test_order_is_pinned():
    """The order of a seed never changes: a saved position would point elsewhere."""
    assert ShuffledOrder([5, 3, 4], seed=7, window=2).ids(np.arange(14)).tolist() == PINNED
    assert sorted(PINNED[:12]) == list(range(12))


def test_shuffle_mixes_and_differs_between_epochs():
    order = ShuffledOrder([100] * 10, seed=1, window=0)
    first, second = order.ids(np.arange(1000)), order.ids(np.arange(1000, 2000))
    assert not np.array_equal(first, second)
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1 and abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert not np.array_equal(first, ShuffledOrder([100] * 10, seed=2, window=0).ids(np.arange(1000)))


def test_cost_of_a_position_does_not_depend_on_it():
    """Far into the millionth epoch is as near as the beginning: nothing is replayed."""
    order = ShuffledOrder([1000] * 50, seed=3, window=4)
    far = order.size * 1_000_000 + 12_345
    assert sorted(order.ids(np.arange(far, far + order.size)).tolist()) != []


def test_a_state_of_other_data_is_refused(folders):
    a, b = ShardSet(folders((5, 4))), ShardSet(folders((5, 5)))
    state = Reader(a, ShuffledOrder(a.counts)).state_in_step().to_json()
    with pytest.raises(ConfigError, match="other data or another order"):
        Reader(b, ShuffledOrder(b.counts), state=state)
    with pytest.raises(ConfigError, match="other data or another order"):
        Reader(a, ShuffledOrder(a.counts, seed=1), state=state)
    assert ReaderState.from_json(state).position == 0
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Reader(a, rank=2, ranks=2)


def test_uneven_state_is_small(folders):
    counts = (23, 23, 23, 23)
    shards = ShardSet(folders(counts))
    readers = [Reader(shards, ShuffledOrder(counts), rank=r, ranks=8) for r in range(8)]
    for r, reader in enumerate(readers):
        numbers(reader, 5 + r % 3)
    state = merge_states([r.state() for r in readers])
    assert state.position + len(state.ahead) == sum(5 + r % 3 for r in range(8))
    assert len(state.to_json()) < 400
    assert ReaderState.from_json(state.to_json()) == state
