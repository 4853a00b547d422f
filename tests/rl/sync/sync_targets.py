"""Rollout engines whose model is a dict. Helper module, not a test."""

import torch

from terrella.rl.sync.receiver import WeightReceiver


class Worker(WeightReceiver):
    """A worker whose model is a dict."""

    device, rank = torch.device("cpu"), 0

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.model_runner = self

    def get_model(self):
        return self

    def reload_weights(self, weights_iterator) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


class Engine:
    """A target that calls its worker as vLLM would."""

    def __init__(self, name: str = "engine") -> None:
        self.name, self.worker, self.version, self.resets = name, Worker(), 0, 0

    def call(self, method, *args, timeout_s):
        return [getattr(self.worker, method)(*args)]

    def accept(self, version, timeout_s) -> None:
        self.version = version
        self.resets += version is not None
