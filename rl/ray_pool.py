"""Ray: any class as actors over nodes. Trainer nodes and sampler hosts are such actors (launch/on_ray.py). Only this
file imports ray.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from ..core.errors import ConfigError, DeadlineError, WorkerError


class Host:
    """What an actor is: holds one object of a class given by name."""

    def __init__(self, target: str) -> None:
        module, name = target.split(":")
        self.inner = getattr(importlib.import_module(module), name)()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.inner, method)(*args)

    def where(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


def connect() -> float:
    """Join the Ray cluster of this machine or of RAY_ADDRESS; returns the GPUs of its best node."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(f"ray: no cluster at {address}; start one with `ray start --head`") from error
    return max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)


class Actors:
    """`count` actors of one class, spread over the nodes: one for each bundle of a placement group."""

    def __init__(self, target: str, count: int, gpus: float, start_s: float) -> None:
        import ray.exceptions
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            raise ConfigError(
                "ray: no cluster; start one (ray start, or launch under the Ray template) and connect with ray.init "
                "first"
            )
        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        self.target, self.group = target, placement_group([bundle] * count, strategy="SPREAD")
        if not self.group.wait(start_s):
            self.close()
            raise DeadlineError(
                f"ray: no room for {count} x {bundle} within {start_s:.0f} s; the cluster has {ray.cluster_resources()}"
            )
        remote = ray.remote(Host)
        self.actors = [
            remote.options(
                num_cpus=1.0,
                num_gpus=gpus,
                max_concurrency=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i),
            ).remote(target)
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
        """`method(*arguments[i])` on actor i. The loss of one, or no answer in time, is a WorkerError by its number
        and node.
        """
        import ray.exceptions

        calls = [a.call.remote(method, *args) for a, args in zip(self.actors, arguments, strict=True)]
        end, answers = time.monotonic() + deadline_s, []
        for number, call in enumerate(calls):
            try:
                answers.append(ray.get(call, timeout=max(end - time.monotonic(), 0.0)))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                node = self.nodes[number][:8]
                raise WorkerError(
                    f"{self.target} {number} on node {node} is lost: {method}: {type(error).__name__}"
                ) from error
        return answers


def _reason(error: Exception) -> str:
    error = getattr(error, "cause", None) or error  # ray wraps what a call raised
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
