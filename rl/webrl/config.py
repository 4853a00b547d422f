"""Web sites as an environment: which tasks, how they are read, and how many are played at once. Importable without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class WebSiteEnvironment:
    """Tasks on web sites, played in the page model or in Chromium: an episode is an agent's rounds on one task."""

    kind: Literal["web-site"]
    max_prompt_tokens: int  # of actor and critic; pages are cut to fit
    tag: str = "WebSites"  # of the tasks that are trained on
    test_tag: str = "WebSitesTest"  # of the tasks that are evaluated on
    tag_files: list[str] = field(default_factory=list)  # YAML files with tags beside those that ship
    templates: list[int] = field(default_factory=list)  # of the local sites; empty for all
    data: str | None = None  # a collect or web-tasks stage whose tasks are trained on; without one all of the tag's
    # shards that `terrella shards make webrl` or `sharegpt` wrote, in place of the oracles'
    demonstrations: str | None = None
    noise: float = 0.0  # chance that the oracle does something without effect in between, which is not to be imitated
    astray: float = 0.0  # chance that a demonstration holds a mistake; it is judged by the world and never imitated
    max_verdict_tokens: int = 16384  # of the outcome reward model
    pad_prompts_to: int = 1  # in front, to a multiple of this: the CPU sampler decodes prompts of one length together
    at_once: int = 64  # worlds that are open together
    # Chromiums of a rank, which share those worlds; default: four a core, fewer where the memory is not enough for them
    browsers: int | None = None
    # play the random policy on the sites of a task file too: it clicks anywhere, and they keep it
    random_elsewhere: bool = False

    tasks: ClassVar[str] = "webrl.tasks:SiteTasks"
    gathers_pieces: ClassVar[bool] = True  # a start without a folder plays to make its tokenizer
    lesson_key: ClassVar[int] = 21  # of the order in which collected steps are imitated

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_verdict_tokens", "pad_prompts_to", "at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0")
        if self.browsers is not None and self.browsers < 1:
            raise ValueError(f"browsers: {self.browsers} must be above 0")
        if not 0 <= self.noise < 1 or not 0 <= self.astray <= 1:
            raise ValueError(f"noise: {self.noise} must be in [0, 1), astray: {self.astray} in [0, 1]")
