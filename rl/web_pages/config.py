"""Settings of web pages as an environment. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..language_config import QuestionSettings


@dataclass(frozen=True, kw_only=True)
class WebPageEnvironment(QuestionSettings):
    """A world model of web pages: page and action in, the list of changes out, rewarded by the F1 of its items."""

    kind: Literal["web-page"]
