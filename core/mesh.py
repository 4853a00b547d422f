"""Who this process is among the ranks, and all communication between them. The only place with rank arithmetic.

Ranks that together hold one copy of the model (tensor, pipeline, context) are *peers*: they train on the same tokens.
The copies are the *data ranks*; a step's tokens are divided among them. The first of the peers *leads*: it alone
samples, plays, judges and writes, and sends its peers what they train on, so that nothing is done or counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from .config import ParallelConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
# for a leader's rollouts, which have their own deadlines; a dead leader ends the run at once
PEER_WAIT = timedelta(hours=24)


@dataclass(frozen=True)
class Place:
    """One rank's place in a layout. Ranks count through tensor, then context, then data, then pipeline, as
    Megatron's groups do.
    """

    data_rank: int
    data_size: int
    is_leader: bool
    peers: tuple[int, ...]  # all ranks of this data rank, the leader first
    twins: tuple[int, ...]  # the ranks at this rank's place in the other copies, by data rank


def place(parallel: ParallelConfig, rank: int, ranks: int) -> Place:
    """Where `rank` of `ranks` stands."""
    if ranks % parallel.model_size:
        raise ConfigError(
            f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} "
            f"does not divide the {ranks} ranks; change ranks or the layout"
        )
    inner, data_size = parallel.tensor * parallel.context, ranks // parallel.model_size
    data_rank, slot, stage = rank // inner % data_size, rank % inner, rank // (inner * data_size)
    first = data_rank * inner
    peers = tuple(p * inner * data_size + first + i for p in range(parallel.pipeline) for i in range(inner))
    twins = tuple(stage * inner * data_size + d * inner + slot for d in range(data_size))
    return Place(data_rank, data_size, rank == peers[0], peers, twins)


@dataclass
class Mesh:
    """All ranks of a run as one of them sees them. Every method that sends is collective: all ranks call it at the
    same point.
    """

    rank: int = 0
    ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    waited: float = 0.0  # seconds spent waiting for other data ranks

    def __post_init__(self) -> None:
        self.place = place(self.parallel, self.rank, self.ranks)
        self._peers = self._group(self.place.peers, PEER_WAIT) if len(self.place.peers) > 1 else None
        self._data: ProcessGroup | None = None  # the whole world
        if 1 < self.data_size < self.ranks:
            self._data = self._group(self.place.twins, timedelta(minutes=self.parallel.timeout_minutes))

    @cached_property
    def _patient(self) -> ProcessGroup | None:
        """Like `_data` with a longer timeout; created on first use, which is the same point for all its members."""
        return self._group(self.place.twins, PEER_WAIT) if self.data_size > 1 else None

    @staticmethod
    def _group(ranks: Sequence[int], timeout: timedelta) -> ProcessGroup:
        import torch.distributed as dist

        # objects travel through host memory; only members create a group, or a large world would create thousands
        made: Any = dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
        return made

    @property
    def data_rank(self) -> int:
        return self.place.data_rank

    @property
    def data_size(self) -> int:
        return self.place.data_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples, plays and writes for its peers too."""
        return self.place.is_leader

    @property
    def is_main(self) -> bool:
        """The one rank that prints and writes the record."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This data rank's contiguous part of a list, of equal size where it divides; `gather` puts the parts back
        in order.
        """
        first, last = (len(items) * (self.data_rank + i) // self.data_size for i in (0, 1))
        return items[first:last]

    def require_even(self, count: int, setting: str) -> int:
        """The part of `count` that each data rank takes; refused by the name of the setting where it does not
        divide.
        """
        if count % self.data_size:
            raise ConfigError(f"{setting} = {count} must be a multiple of the {self.data_size} data ranks")
        return count // self.data_size

    def gather(self, value: T, patient: bool = False) -> list[T]:
        """Every data rank's value, by data rank; peers hold the same value and get the same list. Use `patient` where
        a data rank may still be playing: its rollouts have their own deadlines.
        """
        return self._timed(lambda: self._all(value, self._patient if patient else self._data, self.data_size))

    def gather_all(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return self._timed(lambda: self._all(value, None, self.ranks))

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return any(self.gather_all(flag))

    def barrier(self) -> None:
        """Wait for all ranks; the process group's timeout is the deadline."""
        self.gather_all(None)

    def from_leader(self, make: Callable[[], T]) -> T:
        """What `make` returns on the leader, on all of its peers. Only the leader calls it, so it is not collective."""
        made: Any = make() if self.is_leader else None
        return made if self._peers is None else self._sent(made, self.place.peers[0], self._peers)

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns on the main rank, on every rank. Only the main rank calls it; it must not be collective,
        and may take longer than the process group's timeout (starting servers, playing baselines).
        """
        made: Any = make() if self.is_main else None

        def pass_on() -> T:
            shared = made if self.data_size == 1 or not self.is_leader else self._sent(made, 0, self._patient)
            return shared if self._peers is None else self._sent(shared, self.place.peers[0], self._peers)

        return self._timed(pass_on)

    def exchange(self, parts: Sequence[T]) -> list[T]:
        """All-to-all: send part d to data rank d; returns what each data rank sent here, by data rank."""
        if self.data_size == 1:
            return list(parts)
        return self._timed(lambda: _exchange(parts, self._data))

    def _timed(self, ask: Callable[[], T]) -> T:
        start = time.monotonic()
        answer = ask()
        self.waited += time.monotonic() - start
        return answer

    @staticmethod
    def _all(value: T, group: ProcessGroup | None, size: int) -> list[T]:
        import torch.distributed as dist

        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values

    @staticmethod
    def _sent(value: T, source: int, group: ProcessGroup | None) -> T:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]


def _exchange(parts: Sequence[Any], group: ProcessGroup | None) -> list[Any]:
    import pickle

    import torch
    import torch.distributed as dist

    packed = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in parts]
    lengths = torch.tensor([p.numel() for p in packed])
    theirs = torch.empty_like(lengths)
    dist.all_to_all_single(theirs, lengths, group=group)
    arrived = torch.empty(int(theirs.sum()), dtype=torch.uint8)
    dist.all_to_all_single(arrived, torch.cat(packed), theirs.tolist(), lengths.tolist(), group=group)
    # pickles of our own ranks
    return [pickle.loads(part.numpy().tobytes()) for part in arrived.split(theirs.tolist())]  # noqa: S301
