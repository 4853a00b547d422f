"""A colocated engine that died: its rank alone brings it back, which goes where that rank holds all weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terrella.core.config import ParallelConfig
from terrella.core.errors import ConfigError
from terrella.core.mesh import Mesh
from terrella.rl.rollout import colocated
from terrella.rl.rollout.config import Vllm
from terrella.rl.rollout.vllm_config import VllmSettings


@pytest.mark.parametrize("layout", [{"expert": 2}, {"tensor": 2}])
def test_weights_on_several_ranks_are_not_sent_by_one(layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would take part: the rank would wait for them until the process group gives up."""
    made: list[Any] = []
    monkeypatch.setattr(colocated, "LocalVllm", lambda settings, **options: made.append(options))
    engine: Any = SimpleNamespace(parallel=ParallelConfig(**layout))
    model: Any = None
    colocated.open_colocated(Vllm(colocated=True), VllmSettings("model"), engine, model, Path("unused"), Mesh())
    with pytest.raises(ConfigError, match="vllm: was restarted, but its weights lie on several ranks"):
        made[0]["resync"](SimpleNamespace(name="vllm"))
