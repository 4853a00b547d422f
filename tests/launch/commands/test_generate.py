"""`terrella generate` and `terrella serve` on a small random model: prompts, a chat, the OpenAI-compatible address,
and plain refusals.
"""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.tokenizers import MARK, ByteTokenizer
from terrella.launch import cli
from terrella.launch.commands.serve import open_service
from terrella.launch.text_model import TextModel, model_folder

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% "
    "endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    out = tmp_path_factory.mktemp("model")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=ByteTokenizer.vocab_size,
        max_position_embeddings=96,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    ByteTokenizer().save(out)
    (out / MARK).unlink()  # so that it is read through transformers, as anybody's folder is
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel(folder)


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", *words])
    told = capsys.readouterr()
    return caught.value.code or 0, told.out, told.err  # type: ignore[return-value]


def test_prompts_are_continued_and_a_seed_repeats(folder: Path, capsys: pytest.CaptureFixture) -> None:
    words = (str(folder), "hello", "--max-new-tokens", "8", "--samples", "2")
    first, again, other = run(capsys, *words), run(capsys, *words), run(capsys, *words, "--seed", "1")
    assert first[0] == 0 and first[1] and first == again and first[1] != other[1]


def test_the_greedy_answer_is_that_of_transformers(folder: Path, model: TextModel) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([model.tokenizer.encode("a b c")])
    written = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()
    ours = model.complete(["a b c"], max_new_tokens=12, temperature=0.0)[0]
    assert ours.text == model.tokenizer.decode([i for i in written if i != 2]) and ours.prompt_tokens == 5


def test_without_a_prompt_it_chats(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nagain\n\n"))
    code, out, _ = run(capsys, str(folder), "--max-new-tokens", "4")
    assert code == 0 and out.count("> ") == 3


def test_options_that_would_be_passed_over_are_refused(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, error = run(capsys, str(folder), "--samples", "2")
    assert code == 2 and "--samples: a chat has one answer to a message" in error
    code, _, error = run(capsys, str(folder), "hello", "--system", "Be brief.")
    assert code == 2 and "--system: is for --chat" in error


def test_a_run_without_a_model_and_a_folder_of_neither_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code, _, error = run(capsys, str(tmp_path / "nothing"))
    assert code == 2 and "neither a run directory nor a Hugging Face folder" in error
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "checkpoints" / "rl" / "step-000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"terrella convert to-hf .*step-000002"):
        model_folder(tmp_path)


def ask(url: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_service_speaks_as_openai_does(model: TextModel) -> None:
    service = open_service(model, "127.0.0.1", 0, "small")
    threading.Thread(target=service.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{service.server_address[1]}/v1"
    try:
        with urllib.request.urlopen(f"{base}/models", timeout=60) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "small"
        settings = {"model": "small", "max_tokens": 5, "temperature": 0}
        code, told = ask(f"{base}/chat/completions", {**settings, "messages": [{"role": "user", "content": "hi"}]})
        assert code == 200 and told["choices"][0]["message"]["role"] == "assistant"
        prompt = model.chat_prompt([{"role": "user", "content": "hi"}])
        code, plain = ask(f"{base}/completions", {**settings, "prompt": prompt, "n": 2})
        assert (
            code == 200
            and plain["choices"][0]["text"] == told["choices"][0]["message"]["content"] == plain["choices"][1]["text"]
        )
        assert plain["usage"]["prompt_tokens"] == len(prompt) and plain["usage"]["completion_tokens"] <= 10
        for path, body, message in (
            ("completions", {"prompt": 5}, "prompt"),
            ("completions", {"prompt": "x" * 96}, "96 tokens"),
            ("completions", {"prompt": "x", "stream": True}, "stream"),
            ("chat/completions", {"messages": []}, "messages"),
            ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ):
            code, told = ask(f"{base}/{path}", body)
            assert code == 400 and message in told["error"]["message"], told
    finally:
        service.shutdown()
        service.server_close()


def test_a_client_is_told_of_an_error_of_the_service(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_requests: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.sampler, "generate", fail)
    with open_service(model, "127.0.0.1", 0, "small") as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        code, told = ask(f"http://127.0.0.1:{service.server_address[1]}/v1/completions", {"prompt": "x"})
        service.shutdown()
    assert code == 500 and "RuntimeError: out of memory" in told["error"]["message"]
    assert told["error"]["type"] == "server_error"


def test_an_address_that_is_taken_is_named_by_its_options(model: TextModel) -> None:
    with open_service(model, "127.0.0.1", 0, "small") as service:
        port = service.server_address[1]
        with pytest.raises(ConfigError, match=rf"--host 127\.0\.0\.1 --port {port}: cannot listen there .*in use"):
            open_service(model, "127.0.0.1", port, "small")


def test_serving_leaves_the_folder_as_it_is_and_ctrl_c_is_no_error(folder: Path) -> None:
    before = {p.name: (p.stat().st_mode, p.read_bytes()) for p in folder.iterdir()}, stat.S_IMODE(folder.stat().st_mode)
    words = [sys.executable, "-m", "terrella", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # a background job is started with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None and "/v1; Ctrl-C ends it" in process.stdout.readline()
        process.send_signal(2)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0 and error == ""
    assert before == (
        {p.name: (p.stat().st_mode, p.read_bytes()) for p in folder.iterdir()},
        stat.S_IMODE(folder.stat().st_mode),
    )
