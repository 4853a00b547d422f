"""Syncs adapters alone: vLLM starts on the frozen weights, and each version is a PEFT folder that it loads on top."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.files import write_json
from ...models.config import ModelConfig
from ...models.lora import LoraConfig, peft_tensors, write_peft
from .transports import MANIFEST, Target, Weights, call_all, describe, keep_two


class AdapterTransport:
    """Sends `adapter_weights` through a folder that sender and receivers see (in memory if all are on one machine).
    `base_model` is the folder the targets were started from. Keeps the newest two versions."""

    def __init__(self, folder: Path, model: ModelConfig, config: LoraConfig, base_model: str) -> None:
        self.folder, self.model, self.config, self.base_model = Path(folder), model, config, base_model

    def send(
        self, weights: Weights, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        answers = self.load(self.write(list(weights), version), version, targets, timeout_s)
        keep_two(self.path(version))
        return answers

    def load(
        self, path: Path, version: int, targets: Sequence[Target], timeout_s: float
    ) -> dict[str, list[dict[str, Any]]]:
        """Let targets load a version that was written earlier."""
        answers = call_all(targets, "terrella_check_adapter", str(path), str(version), timeout_s=timeout_s)
        for target in targets:
            if not any("error" in a or a["damaged"] for a in answers[target.name]):
                try:
                    target.load_adapter(str(path), version, timeout_s)
                except Exception as error:
                    answers[target.name] = [{"error": f"adapter: {type(error).__name__}: {error}"}]
        return answers

    def path(self, version: int) -> Path:
        """The folder of a version."""
        return self.folder / f"adapter-{version:08d}"

    def write(self, adapters: list[tuple[str, Any]], version: int) -> Path:
        """Write a version's PEFT folder; the manifest comes last."""
        path = self.path(version)
        shutil.rmtree(path, ignore_errors=True)
        write_peft(path, self.model, self.config, adapters, self.base_model)
        entries = [describe(name, tensor) for name, tensor in peft_tensors(self.model, adapters).items()]
        write_json(path / MANIFEST, {"version": version, "tensors": entries})
        return path
