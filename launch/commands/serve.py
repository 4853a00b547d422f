"""`terrella serve RUN_OR_FOLDER`: a trained model behind an OpenAI-compatible address. One request at a time; vLLM
serves many.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...core.errors import ConfigError, TerrellaError, describe_error
from ...core.ports import listening_at

if TYPE_CHECKING:
    from ..text_model import TextModel

BODY_LIMIT = 16 << 20
READ_S = 60.0  # a client that sends nothing for so long is let go


@click.command()
@click.argument("model", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 opens it to the network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free one.")
@click.option(
    "--name", help="Name of the model in requests; default the folder's. (Of the machine, for a sampler host.)"
)
def serve(model: Path, host: str, port: int, name: str | None) -> None:
    """Serve the model of a run or of a Hugging Face folder at http://HOST:PORT/v1 until Ctrl-C. The folder is only
    read.
    """
    from ...rl.rollout.hosts import VARIABLE
    from ..text_model import TextModel, model_folder

    # in job scripts of before `terrella sampler-host`
    if os.environ.get(VARIABLE, "").rpartition(":")[0] == str(model):
        from .sampler_host import lend

        lend(model, name)
        return
    model_folder(model)  # a wrong path is refused before torch is loaded
    service = open_service(TextModel(model), host, port, name or model.resolve().name)
    try:
        click.echo(
            f"serving {model} as '{name or model.resolve().name}' at http://{host}:{service.server_address[1]}/v1; "
            "Ctrl-C ends it"
        )
        service.serve_forever()
    except KeyboardInterrupt:
        click.echo("ended")
    finally:
        service.server_close()


def open_service(model: TextModel, host: str, port: int, name: str) -> ThreadingHTTPServer:
    """A service that answers /v1/models, /v1/completions and /v1/chat/completions once `serve_forever` is called."""
    busy = threading.Lock()

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path == "/v1/chat/completions"
        if body.get("stream"):
            raise ConfigError("stream: answers come whole here; leave it out")
        prompt = model.chat_prompt(_messages(body)) if chat else body.get("prompt")
        given: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        prompts = [p for p in given if isinstance(p, str)]
        if not prompts or len(prompts) < len(given):
            raise ConfigError("prompt: a text or a list of texts is needed")
        samples = int(_number(body, "n", 1, 1, 128))
        most = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        with busy:
            answers = model.complete(
                prompts,
                max_new_tokens=int(_number(body, most, 256, 1, 1 << 20)),
                temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
                samples=samples,
                seed=int(_number(body, "seed", int(time.time() * 1000) % (1 << 31), 0, 1 << 62)),
            )
        choices = []
        for index, found in enumerate(answers):
            said = {"message": {"role": "assistant", "content": found.text}} if chat else {"text": found.text}
            choices.append({"index": index, **said, "finish_reason": found.finish, "logprobs": None})
        used = (sum(a.prompt_tokens for a in answers[::samples]), sum(a.tokens for a in answers))
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": name,
            "choices": choices,
            "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
        }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = READ_S

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._say(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "terrella"}]})
            elif self.path == "/health":
                self._say(200, {})
            else:
                self._say(404, _error(f"{self.path}: no such address"))

        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length") or 0)
                if size > BODY_LIMIT:
                    self.close_connection = True
                    self._say(413, _error(f"a request of {size} bytes is over the limit of {BODY_LIMIT}"))
                    return
                body = json.loads(self.rfile.read(size))
                if self.path not in ("/v1/completions", "/v1/chat/completions"):
                    self._say(404, _error(f"{self.path}: no such address"))
                    return
                if not isinstance(body, dict):
                    raise ConfigError("the request must be a JSON object")
                self._say(200, answer(self.path, body))
            except (TerrellaError, ValueError, RecursionError) as error:
                self._say(400, _error(str(error)))
            except OSError:  # the client went away
                raise
            except Exception as error:
                self._say(500, _error(describe_error(error), "server_error"))

        def _say(self, code: int, value: dict[str, Any]) -> None:
            text = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with listening_at(host, port):
        return ThreadingHTTPServer((host, port), Handler)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
    ):
        raise ConfigError("messages: a list of {role, content} with texts is needed")
    return messages


def _number(body: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{key}: {value!r} must be a number from {low:g} to {high:g}")
    return value


def _error(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}
