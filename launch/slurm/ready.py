"""The checked-in sbatch files: shipped recipes on 1 to 64 nodes of 8 H100. `python -m terrella.launch.slurm.ready` writes them anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .render import Plan, render
from .settings import JobSettings

FOLDER = Path(__file__).parent / "ready"


@dataclass(frozen=True)
class Ready:
    """A recipe on some numbers of nodes. Batch sizes grow with the nodes where a step would not divide over the ranks."""

    recipe: str
    nodes: tuple[int, ...]
    per_rank: dict[str, int] = field(default_factory=dict)  # setting -> its least value on each rank
    time: str = "4:00:00"

    def plan(self, nodes: int) -> Plan:
        """The launch of this recipe on so many nodes."""
        settings = JobSettings(nodes=nodes, time=self.time)
        overrides = tuple(f"{key}={each * settings.world}" for key, each in self.per_rank.items())
        words = " ".join(f"--set {o}" for o in overrides)
        command = f"terrella launch {self.recipe} --nodes {nodes} {words}".strip()
        return Plan(self.recipe, f"runs/{self.recipe}-{nodes}n", ".", settings, overrides, regenerate=command)


NODES = (1, 2, 4, 8, 16, 32, 64)
LANGUAGE = {"stages.1.sequences_per_step": 4, "stages.2.prompts_per_step": 2, "stages.3.sequences_per_step": 4}
RECIPES = (
    Ready(
        "sokoban-tiny",
        NODES,
        per_rank={"stages.1.sequences_per_step": 16, "stages.2.prompts_per_step": 2, "stages.3.sequences_per_step": 16},
    ),
    Ready("text-game-tiny", NODES, LANGUAGE),
    Ready("web-page-tiny", NODES, LANGUAGE),
)


def files() -> Iterator[tuple[str, str]]:
    """Name and text of every ready script."""
    for item in RECIPES:
        for nodes in item.nodes:
            for script in render(item.plan(nodes)):
                yield f"{item.recipe}-{nodes:02d}n.sbatch", script.text


def main() -> None:
    """Write the folder anew."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.sbatch"):
        path.unlink()
    for name, text in files():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
