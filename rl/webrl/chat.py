"""A language model behind an OpenAI-compatible address, asked for many texts at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...core.errors import ConfigError
from ...data.trajectory import Invalid
from ..chat_completion import NO_ANSWER, complete


@dataclass(frozen=True)
class ChatApi:
    """Where the model is. The key is read from the environment and stands in no file."""

    url: str  # of the API, such as http://host:8000/v1
    model: str
    key_variable: str = "OPENAI_API_KEY"
    deadline_s: float = 120.0  # of one request, its whole answer included
    together: int = 16  # requests in flight
    tries: int = 2

    def ask_all(self, texts: Sequence[str], temperature: float) -> list[str | Invalid]:
        """The answers in the order of the messages, several requests at a time. One that got none after a few tries is
        Invalid; an address that answers nothing at all is an error."""
        with ThreadPoolExecutor(self.together) as pool:
            answers = list(pool.map(lambda text: self._try(text, temperature), texts))
        faults = [a.reason for a in answers if isinstance(a, Invalid)]
        if answers and len(faults) == len(answers):
            raise ConfigError(f"url: the language model at {self.url} did not answer: {faults[0]}; check url and model")
        return answers

    def _try(self, text: str, temperature: float) -> str | Invalid:
        reason = ""
        for _ in range(self.tries):
            try:
                return self._request(text, temperature)
            except NO_ANSWER as error:
                reason = f"{type(error).__name__}: {error}"
        return Invalid(reason)

    def _request(self, text: str, temperature: float) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "temperature": temperature, "max_tokens": 2048, "messages": messages}
        return str(complete(self.url, body, os.environ.get(self.key_variable, ""), self.deadline_s)["content"])
