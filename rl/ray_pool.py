"""Ray: any class as actors over nodes. Samplers and world workers form pools whose lost calls are asked again elsewhere; trainer
ranks form a gang that fails as one, by name. Only this file imports ray.

Without Ray the same parts run on one node: torchrun for ranks, `VllmServer` for samplers, threads and processes for worlds.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from ..core.errors import ConfigError, DeadlineError, WorkerError
from ..core.ports import free_port
from ..data.trajectory import Invalid
from .rollout.sampler import Sample, SampleRequest

LOST_S = 20.0  # until Ray tells of a death that a peer has felt


class Host:
    """What an actor is: holds one object of a class given by name."""

    def __init__(self, target: str, options: dict[str, Any]) -> None:
        module, name = target.split(":")
        self.inner = getattr(importlib.import_module(module), name)(**options)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.inner, method)(*args)

    def where(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


class Rank:
    """One trainer rank: joins the others through the environment that torch.distributed reads."""

    def address(self) -> tuple[str, int]:
        """Where rank 0 can be met."""
        host = socket.gethostbyname(socket.gethostname())
        return host, free_port("0.0.0.0")

    def run(self, target: str, rank: int, world: int, address: tuple[str, int], options: dict[str, Any]) -> Any:
        """Run `module:function(**options)` as this rank."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
        module, name = target.split(":")
        return getattr(importlib.import_module(module), name)(**options)


def connect(address: str = "auto") -> float:
    """Join the Ray cluster of this machine or of RAY_ADDRESS; returns the GPUs of its best node."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", address), log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(f"ray: no cluster at {os.environ.get('RAY_ADDRESS', address)}; start one with `ray start --head`") from error
    return max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)


class Actors:
    """`count` actors of one class, one for each bundle of a placement group."""

    def __init__(
        self,
        target: str,
        options: dict[str, Any],
        count: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        strategy: str = "SPREAD",
        start_s: float = 120.0,
    ) -> None:
        import ray.exceptions
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            raise ConfigError("ray: no cluster; start one (ray start, or launch under the Ray template) and connect with ray.init first")
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self.target, self.group = target, placement_group([bundle] * count, strategy=strategy)
        if not self.group.wait(start_s):
            self.close()
            raise DeadlineError(
                f"ray: no room for {count} x {bundle} ({strategy}) within {start_s:.0f} s; the cluster has {ray.cluster_resources()}"
            )
        remote = ray.remote(Host)
        self.actors = [
            remote.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_concurrency=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i),
            ).remote(target, options)
            for i in range(count)
        ]
        try:
            self.nodes = ray.get([a.where.remote() for a in self.actors], timeout=start_s)
        except ray.exceptions.GetTimeoutError as error:
            self.close()
            raise DeadlineError(f"ray: {target}: {count} actors did not start within {start_s:.0f} s") from error
        except ray.exceptions.RayActorError as error:  # with its node: a place on it may still be given after its loss
            self.close()
            raise WorkerError(f"ray: {target}: an actor was lost while it started: {_reason(error)}") from error

    def close(self) -> None:
        """End the actors and free their places."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in getattr(self, "actors", []):
            ray.kill(actor)
        remove_placement_group(self.group)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float) -> list[Any]:
        """`method(*arguments[i])` on actor i. The loss of one, or no answer in time, is a WorkerError by its number and node."""
        import ray.exceptions

        calls = [a.call.remote(method, *args) for a, args in zip(self.actors, arguments, strict=True)]
        end, answers = time.monotonic() + deadline_s, []
        for number, call in enumerate(calls):
            try:
                answers.append(ray.get(call, timeout=max(end - time.monotonic(), 0.0)))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                node = self.nodes[number][:8]
                raise WorkerError(f"{self.target} {number} on node {node} is lost: {method}: {type(error).__name__}") from error
        return answers


class Pool(Actors):
    """Actors that each can do any call. A call lost with its actor is asked again of another, within a budget."""

    reissued = 0

    def map(self, method: str, items: Sequence[Any], *, deadline_s: float, retries: int = 2) -> list[Any | Invalid]:
        """`method(item)` for every item, in order. An exception of the call, a loss beyond the budget or a missed deadline is Invalid."""
        import ray.exceptions

        results: dict[int, Any] = {}
        waiting = list(range(len(items)))[::-1]
        tries = [0] * len(items)
        idle, running = list(range(len(self.actors))), {}
        end = time.monotonic() + deadline_s
        while len(results) < len(items):
            while waiting and idle:
                actor, index = idle.pop(), waiting.pop()
                running[self.actors[actor].call.remote(method, items[index])] = (actor, index)
            if not running:
                raise WorkerError(f"ray: {self.target}: all actors are lost, {len(items) - len(results)} calls of {method} are open")
            ready, _ = ray.wait(list(running), num_returns=1, timeout=max(min(end - time.monotonic(), 1.0), 0.0))
            for reference in ready:
                actor, index = running.pop(reference)
                try:
                    results[index] = ray.get(reference)
                    idle.append(actor)
                except ray.exceptions.RayActorError as error:  # the actor is gone for good
                    self.reissued += 1
                    tries[index] += 1
                    if tries[index] > retries:
                        results[index] = Invalid(f"ray: {method}: lost {tries[index]} times: {type(error).__name__}")
                    else:
                        waiting.append(index)
                except Exception as error:
                    results[index] = Invalid(f"ray: {method}: {_reason(error)}")
                    idle.append(actor)
            if time.monotonic() > end:
                for _, index in running.values():
                    results.setdefault(index, Invalid(f"ray: {method}: did not finish within {deadline_s:g} s"))
                for index in waiting:
                    results.setdefault(index, Invalid(f"ray: {method}: not begun within {deadline_s:g} s"))
        return [results[i] for i in range(len(items))]


class PoolSampler:
    """A sampler over a pool of actors that each hold one, such as `LocalVllm`."""

    def __init__(self, pool: Pool, *, deadline_s: float, chunk: int = 64) -> None:
        self.pool, self.deadline_s, self.chunk = pool, deadline_s, chunk

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        parts = [requests[i : i + self.chunk] for i in range(0, len(requests), self.chunk)]
        answers = self.pool.map("generate", parts, deadline_s=self.deadline_s)
        return [
            one
            for part, found in zip(parts, answers, strict=True)
            for one in ([found] * len(part) if isinstance(found, Invalid) else found)
        ]


class Gang(Actors):
    """Trainer ranks. They live and die together: the loss of one ends the run by its name."""

    def __init__(self, world: int, **options: Any) -> None:
        super().__init__(f"{__name__}:Rank", {}, world, **options)
        self.world = world

    def run(self, target: str, options: dict[str, Any], *, deadline_s: float) -> list[Any]:
        """Run `module:function(**options)` on all ranks; returns their results in rank order."""
        import ray

        address = ray.get(self.actors[0].call.remote("address"), timeout=30)
        calls = [a.call.remote("run", target, rank, self.world, address, options) for rank, a in enumerate(self.actors)]
        open_calls, end = list(calls), time.monotonic() + deadline_s
        while open_calls:
            ready, open_calls = ray.wait(open_calls, num_returns=1, timeout=max(end - time.monotonic(), 0.0))
            if not ready:
                late = [calls.index(c) for c in open_calls]
                raise DeadlineError(f"ray: {target}: ranks {late} did not finish within {deadline_s:.0f} s")
            rank = calls.index(ready[0])
            try:
                ray.get(ready[0])
            except Exception as error:
                # a peer's broken connection may be seen before the death that caused it: name the rank whose actor is gone
                lost = self._lost(calls, rank, error)
                raise WorkerError(f"ray: {target}: rank {lost} on node {self.nodes[lost][:8]} failed: {_reason(error)}") from error
        return ray.get(calls)

    def _lost(self, calls: list[Any], first: int, error: Exception) -> int:
        import ray.exceptions

        if isinstance(error, ray.exceptions.RayActorError):
            return first
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=LOST_S)
        for reference in ready:
            try:
                ray.get(reference)
            except ray.exceptions.RayActorError:
                return calls.index(reference)
            except Exception:  # its call failed, but its process lives
                continue
        return first


def _reason(error: Exception) -> str:
    error = getattr(error, "cause", None) or error  # ray wraps what a call raised
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
