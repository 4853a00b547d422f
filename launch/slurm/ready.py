"""The checked-in sbatch files: shipped recipes on nodes of 8 H100. `python -m terrella.launch.slurm.ready` writes them anew.

A recipe asks for them with one comment line, because on how many nodes it is run is no setting of a run:

    # cluster: {nodes: [1, 2, 4], each: {stages.1.sequences_per_step: 16}, time: "4:00:00"}

`each` names settings that grow with the cluster, by their value for one rank; `rollout_nodes` are further nodes for vLLM servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from ...core.errors import ConfigError
from .. import recipe as recipes
from .render import Plan, render
from .settings import JobSettings

FOLDER = Path(__file__).parent / "ready"
LINE = re.compile(r"^# cluster:\s*(\{.*\})\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Ready:
    """A recipe on some numbers of nodes."""

    recipe: str
    nodes: list[int]
    each: dict[str, int] = field(default_factory=dict)
    rollout_nodes: int = 0
    time: str = "4:00:00"

    def plan(self, nodes: int) -> Plan:
        """The launch of this recipe on so many nodes."""
        settings = JobSettings(nodes=nodes, time=self.time, rollout_nodes=self.rollout_nodes)
        overrides = tuple(f"{key}={value * settings.world}" for key, value in self.each.items())
        words = [f"--nodes {nodes}"] + ([f"--rollout-nodes {self.rollout_nodes}"] if self.rollout_nodes else [])
        words += ([f"--time {self.time}"] if self.time != JobSettings.time else []) + [f"--set {o}" for o in overrides]
        command = f"terrella launch {self.recipe} {' '.join(words)}"
        return Plan(self.recipe, f"runs/{self.recipe}-{nodes}n", ".", settings, overrides, regenerate=command)


def declared(recipe: str) -> Ready | None:
    """What a shipped recipe asks for, or None."""
    path = recipes.find(recipe)
    match = LINE.search(path.read_text(encoding="utf-8"))
    if match is None:
        return None
    try:
        told = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: the line '# cluster:' is no YAML: {error}") from error
    known = {f.name for f in fields(Ready)} - {"recipe"}
    if unknown := set(told) - known:
        raise ConfigError(f"{path}: the line '# cluster:' has '{sorted(unknown)[0]}'; it may have {', '.join(sorted(known))}")
    if not told.get("nodes"):
        raise ConfigError(f"{path}: the line '# cluster:' names no nodes")
    return Ready(recipe, **told)


def files() -> Iterator[tuple[str, str]]:
    """Name and text of every ready script."""
    for name in recipes.shipped():
        item = declared(name)
        for nodes in item.nodes if item else ():
            for script in render(item.plan(nodes)):  # type: ignore[union-attr]
                yield f"{name}-{nodes:02d}n.sbatch", script.text


def main() -> None:
    """Write the folder anew."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.sbatch"):
        path.unlink()
    for name, text in files():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
