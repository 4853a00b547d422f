"""A language model behind an OpenAI-compatible address, asked for one text."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass

from ...core.errors import ConfigError


@dataclass(frozen=True)
class ChatApi:
    """Where the model is. The key is read from the environment and stands in no file."""

    url: str  # of the API, such as http://host:8000/v1
    model: str
    key_variable: str = "OPENAI_API_KEY"
    deadline_s: float = 120.0

    def ask(self, text: str, temperature: float) -> str:
        """The answer to one message."""
        body = {"model": self.model, "temperature": temperature, "max_tokens": 2048, "messages": [{"role": "user", "content": text}]}
        headers = {"Content-Type": "application/json"}
        if os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.deadline_s) as answer:
                return str(json.loads(answer.read(4_000_000))["choices"][0]["message"]["content"])
        except (urllib.error.URLError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"url: the language model at {self.url} did not answer: {type(error).__name__}; check url and model"
            ) from error
