"""A task of one's own in an empty folder: an environment, a reward and rows, trained, evaluated beside baselines,
exported; and what goes wrong in them is named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from terrella.core import run as runs
from terrella.core.errors import ConfigError
from terrella.core.ports import free_port
from terrella.launch import recipe
from terrella.tests.golden.play import ALONE
from terrella.tests.sampling import in_turn

PATIENCE_S = 900.0  # of a busy machine; a free one needs half a minute
ROWS = "".join(f'{{"question": "{n}+{n}", "answer": {2 * n}}}\n' for n in range(10))
REWARD = """from grading import same
def score(prompt, answer, info):
    return {"reward": float(same(answer, info["answer"])), "digit": answer[:1].isdigit()}
"""
GRADING = "def same(answer, truth): return answer.strip() == str(truth)\n"
ENVIRONMENT = """from terrella import Environment
class Echo(Environment):
    def tasks(self, split):
        return list("abcdef" if split == "train" else "xyz")
    def play(self, task):
        answer = yield f"Say {task}"
        return float(answer.startswith(task))
    def demonstration(self, task):
        return task
    def baselines(self):
        return {"always x": lambda prompt, task: "x"}
"""
SCRIPT = """import my
import terrella

if __name__ == "__main__":
    settings = {"stages.sft.optimizer.lr": 0.01, "stages.sft.sequences_per_step": 6, "stages.evaluate.max_new_tokens": 4}
    made = terrella.train("sft", model="tiny", env=my.Echo, overrides=settings)
    names = [row["name"] for row in made.results["evaluate"]["rows"]]
    print("MADE", made.run, made.export, names, made.summary["headline"])
"""  # noqa: E501
WORSE = """import time

def raises(prompt, answer, info):
    return 1 / 0

def nan(prompt, answer, info):
    return float("nan")

def hangs(prompt, answer, info):
    with open("calls", "a") as file:
        file.write("x")
    time.sleep(100)

def sometimes(prompt, answer, info):
    if info["answer"] == 4:
        raise OSError("the judge's server is away")
    return len(answer) / 10
"""
FRESH = """name: fresh
model: {layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 48, vocab: 40, max_positions: 64}
env: {kind: "my.py:Echo"}
stages:
  - {kind: start, name: start, tokenizer: "letters.py:letters"}
  - {kind: sft, name: sft, init: start, sequences_per_step: 6, steps: 1, optimizer: {lr: 0.01}}
  - {kind: export, name: export, model: sft}
"""
LETTERS = """from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

def letters():
    fast = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<eos>", *"S abcdefghijklmnopqrstuvwxyz"])}, "<eos>"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")

def raises():
    return 1 / 0
"""  # noqa: E501
TINY = [
    "stages.rl.max_new_tokens=4",
    "stages.rl.prompts_per_step=4",
    "stages.rl.steps=1",
    "stages.evaluate.max_new_tokens=4",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with a model that transformers wrote; of the user's own there are four files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from terrella.data.tokenizers import MARK, ByteTokenizer

    folder = tmp_path_factory.mktemp("own")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    sizes |= {"intermediate_size": 48, "vocab_size": 260, "max_position_embeddings": 64, "tie_word_embeddings": True}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes)).float().save_pretrained(folder / "tiny")
    ByteTokenizer().save(folder / "tiny")
    (folder / "tiny" / MARK).unlink()  # as a folder of somebody else's
    (folder / "tiny" / "generation_config.json").write_text('{"eos_token_id": [2, 13]}')  # 13 is a line feed
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "my.py").write_text(REWARD + ENVIRONMENT)
    (folder / "grading.py").write_text(GRADING)
    assert (ROWS + REWARD + GRADING + ENVIRONMENT).count("\n") <= 25
    return folder


def terrella(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, *words] if words[0].endswith(".py") else [sys.executable, "-m", "terrella", *words]
    return subprocess.run(program, cwd=place, env=whole, capture_output=True, text=True, timeout=PATIENCE_S)


def grpo(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    settings = [word for setting in TINY for word in ("--set", setting)]
    options = ["--model", "tiny", "--data", "rows.jsonl", "--reward", "my.py:score", "--template", "{{ question }}="]
    return terrella(place, "train", "grpo", *options, *settings, *words)


def rows_of(table: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["kind"] for row in table["rows"]}


@pytest.mark.timeout(2 * PATIENCE_S)
def test_grpo_from_the_command_line(place: Path) -> None:
    done = grpo(place, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    run = place / "runs" / "grpo"
    kinds = {
        "empty answer": "baseline",
        "most common answer": "baseline",
        "start": "model",
        "rl": "model",
        "demonstrations": "ceiling",
    }
    assert rows_of(json.loads((run / "results" / "evaluate.json").read_text())) == kinds
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2] and all(
        row["invalid"] == 0 and "score/digit" in row for row in metrics
    )
    assert f"terrella train {Path('runs', 'grpo', 'config.yaml')} --run {Path('runs', 'grpo')} --steps 4" in done.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(run / "export"),
        AutoTokenizer.from_pretrained(run / "export"),
    )
    assert model.config.hidden_size == 32 and tokenizer.decode(tokenizer.encode("1+1=\n\n2")) == "1+1=\n\n2"
    assert model.generation_config.eos_token_id == [2, 13]
    umask = os.umask(0o022)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (run / "export").iterdir()} == {0o666 & ~umask}
    card = (run / "export" / "README.md").read_text()
    for piece in (
        "seed 0",
        f"Base model: {place / 'tiny'}",
        "`rl`: rl, grpo, 2 steps",
        "rows.jsonl`: xxh3-128",
        "grading.py`: sha256",
    ):
        assert piece in card, card
    for piece in (
        "| most common answer | baseline |",
        "| rl | model |",
        "0 (n = 1)",
        "| demonstrations | ceiling |",
        "exactly as the model read it",
        "\n    5+5=\n",
    ):
        assert piece in card, card
    assert "samples_per_prompt: " in card and "largest difference between the trainer's logits" in card

    again = grpo(place, "--steps", "2")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    (place / "my.py").write_text(REWARD.replace("1]", "2]") + ENVIRONMENT)
    changed = grpo(place, "--steps", "2")
    (place / "my.py").write_text(REWARD + ENVIRONMENT)
    assert changed.returncode == 2 and "env.reward, the file" in changed.stderr and "my.py" in changed.stderr
    (place / "grading.py").write_text(GRADING.replace("strip", "rstrip"))
    beside = grpo(place, "--steps", "3")
    (place / "grading.py").write_text(GRADING)
    assert beside.returncode == 2 and f"{place / 'grading.py'}: has changed since this run was started" in beside.stderr
    assert (run / "report.html").exists() and not (run / "set-aside").exists()  # nothing was moved for it

    # the run's own template, reward, stop ids and length of answers; of these rows the last was held out
    (place / "others.jsonl").write_text("".join(ROWS.splitlines(keepends=True)[7:]))
    done = terrella(place, "eval", "rows", "--model", "runs/grpo", "--data", "others.jsonl", "--out", "others.json")
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((place / "others.json").read_text())
    trivial = {"empty answer": "baseline", "most common answer": "baseline"}
    assert rows_of(table) == {**trivial, "model": "model", "demonstrations": "ceiling"}
    assert "2 of 3 test tasks are among those to train on" in done.stdout and "2 of the tasks are among" in done.stdout
    assert {row["name"]: row["cells"][0]["value"] for row in table["rows"]}["demonstrations"] == 1.0
    assert all(row["cells"][0]["n"] == 3 for row in table["rows"])


@pytest.mark.full
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_run_goes_on_from_its_own_settings(place: Path) -> None:
    assert grpo(place, "--run", "longer").returncode == 0
    done = terrella(place, "train", "longer/config.yaml", "--steps", "2")
    assert done.returncode == 0 and "going on with rl to step 2" in done.stdout, done.stdout + done.stderr
    assert len((place / "longer" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.timeout(2 * PATIENCE_S)
@in_turn("sft from python")
def test_sft_on_an_environment_from_python(place: Path) -> None:
    (place / "script.py").write_text(SCRIPT)
    done = terrella(place, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["empty answer", "always x", "start", "sft", "demonstrations"]
    assert f"MADE runs/sft runs/sft/export {names} sft" in done.stdout
    # one epoch over six tasks
    assert json.loads((place / "runs" / "sft" / "stages" / "sft.json").read_text())["steps"] == 1


def test_an_evaluation_without_a_valid_result_is_an_error_and_names_options(place: Path) -> None:
    (place / "worse.py").write_text(WORSE)
    words = ["eval", "rows", "--model", "tiny", "--data", "rows.jsonl", "--template", "{{ question }}="]
    words += ["--reward", "worse.py:raises", "--out", "none.json"]
    done = terrella(place, *words, "--max-new-tokens", "4")
    assert done.returncode == 9 and "error: model: no result is valid. " in done.stderr, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stderr and json.loads((place / "none.json").read_text())["invalid"]
    done = terrella(place, *words, "--max-new-tokens", "400")
    assert done.returncode == 2 and "with --max-new-tokens = 400 exceed" in done.stderr, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(2 * PATIENCE_S)
def test_evaluation_from_python(place: Path) -> None:
    code = """import terrella
if __name__ == "__main__":
    settings = {"env.template": "{{ question }}=", "stages.evaluate.max_new_tokens": 4}
    table = terrella.evaluate("tiny", data="rows.jsonl", reward="my.py:score", overrides=settings)
    print("ROWS", [(row["name"], row["cells"][0]["n"]) for row in table["rows"]])
"""
    (place / "evaluation.py").write_text(code)
    before = sorted(place.iterdir())
    done = terrella(place, "evaluation.py")
    assert "ROWS [('empty answer', 10), ('model', 10), ('demonstrations', 10)]" in done.stdout, (
        done.stdout + done.stderr
    )
    assert sorted(place.iterdir()) == before
    screen = " ".join(done.stdout.split())
    assert "Test tasks: mean reward, greedy: empty answer 0" in screen and "has not recorded" not in screen
    assert "report.html" not in screen and "Next:" not in screen  # nothing is left to look at


def play_lane(place: Path, cases: list[tuple[str, Any]]) -> dict[str, str]:
    """Play recipes, or write files, one after the other in one process; the errors that they end with."""
    (place / "cases.json").write_text(json.dumps(cases))
    whole = os.environ | ALONE | {"MASTER_PORT": str(free_port())}
    words = [sys.executable, "-m", "terrella.tests.launch.own_lane", "cases.json"]
    done = subprocess.run(words, cwd=place, env=whole, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((place / "cases.errors.json").read_text())


@pytest.mark.timeout(2 * PATIENCE_S)
@in_turn("tokenizer by path")
def test_a_tokenizer_by_path(place: Path) -> None:
    from transformers import AutoTokenizer

    (place / "fresh.yaml").write_text(FRESH)
    (place / "letters.py").write_text(LETTERS)
    cases: list[tuple[str, Any]] = [
        ("fresh", ["fresh.yaml"]),
        ("unmade", ["fresh.yaml", "stages.start.tokenizer=letters.py:raises"]),
        ("small", ["fresh.yaml", "model.vocab=20"]),
    ]
    with pytest.raises(ConfigError, match="tokenizer: the model in `folder` brings its own"):
        recipe.load(str(place / "fresh.yaml"), (f"stages.start.folder={place / 'tiny'}",))
    errors = play_lane(place, cases)
    assert errors.keys() == {"unmade", "small"}
    assert "letters.py:raises gave none:" in errors["unmade"] and "ZeroDivisionError" in errors["unmade"]
    assert "model.vocab = 20 is below the 29 tokens of" in errors["small"]
    kept = AutoTokenizer.from_pretrained(place / "runs" / "fresh" / "export")
    assert kept.encode("Say b") == [1, 3, 27, 2, 4] and kept.decode([1, 3, 27, 2, 4]) == "Say b"
    (place / "letters.py").write_text(LETTERS + "\n")
    with pytest.raises(ConfigError, match=r"started with other settings .*tokenizer"):
        runs.create(place / "runs" / "fresh", recipe.load(str(place / "fresh.yaml")))


@pytest.mark.timeout(2 * PATIENCE_S)
def test_what_goes_wrong_in_a_users_files_is_named(place: Path) -> None:
    """One process plays them all. A fault is never a zero: it is counted, and above a share it stops the run, which
    keeps what it has.
    """
    (place / "worse.py").write_text(WORSE)
    (place / "bad.jsonl").write_text(ROWS + '{"question": "1+1", "answer": 2\n')
    (place / "mute.jsonl").write_text(ROWS + '{"answer": 2}\n')
    common = ["model.folder=tiny", "env.template='{{ question }}='", *TINY]
    cases = {
        name: ["grpo", "env.train=rows.jsonl", f"env.reward=worse.py:{name}", *common]
        for name in ("raises", "nan", "sometimes")
    }
    cases["hangs"] = ["grpo", "env.train=rows.jsonl", "env.reward=worse.py:hangs", "env.deadline_s=0.5", *common]
    cases["hangs"] += ["stages.rl.samples_per_prompt=4"]
    cases["sometimes"] += ["stages.rl.prompts_per_step=9"]  # all rows, of which one is bad
    cases["ppo"] = ["ppo", "env.train=rows.jsonl", "env.reward=my.py:score", *common]
    (place / "other.jsonl").write_text(ROWS)
    cases["other"] = ["grpo", "env.train=other.jsonl", "env.reward=worse.py:raises", *common]
    for name in ("bad", "mute", "absent"):
        cases[name] = ["grpo", f"env.train={name}.jsonl", "env.reward=my.py:score", *common]
    # gone on with on other rows
    played = [*cases.items(), ("other.jsonl", ROWS.replace("+", "-")), ("other", cases["other"])]
    errors = play_lane(place, played)
    for name, said in {
        "raises": ("RolloutError", "32 of 32 samples are Invalid", "worse.py", "ZeroDivisionError"),
        "nan": ("RolloutError", "32 of 32 samples are Invalid", "worse.py:nan", "nan"),
        "hangs": ("RolloutError", "16 of 16 samples are Invalid", "worse.py:hangs", "0.5 s"),
        "bad": ("ConfigError", "bad.jsonl:11: not JSON"),
        "mute": ("ConfigError", "mute.jsonl:11: template: 'question' is undefined"),
        "absent": ("ConfigError", "absent.jsonl", "no such file"),
        "other": ("ConfigError", "other.jsonl: has changed since this run was started"),
    }.items():
        assert all(words in errors[name] for words in said), errors[name]
    for name in ("raises", "nan", "hangs"):  # what was done before stays
        run = place / "runs" / name
        assert (run / "stages" / "start.json").exists() and not (run / "stages" / "rl.json").exists()
    assert (place / "calls").read_text() == 5 * "x"  # of 16 samples 4 may be Invalid: the others are not waited for
    assert "sometimes" not in errors and "ppo" not in errors
    metrics = json.loads((place / "runs" / "sometimes" / "metrics.jsonl").read_text())
    assert metrics["invalid"] == 8 and metrics["reward/mean"] > 0
    assert (place / "runs" / "ppo" / "export" / "config.json").exists()


def test_options_that_do_not_fit_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from terrella.launch import cli

    monkeypatch.chdir(place)
    own = ["--model", "tiny", "--data", "rows.jsonl"]
    for words, said in (
        (
            ["demo", "--data", "rows.jsonl"],
            "--data: demo trains on a task of its own; --data is an option of the recipes grpo, ppo, sft",
        ),
        (
            ["grpo"],
            (
                "grpo: trains on a task of your own; add --model FOLDER and --data FILE (or --env FILE.py:NAME) and "
                "--reward"
            ),
        ),
        (["grpo", *own], "add --reward FILE.py:NAME"),
        (["grpo", *own, "--env", "my.py:Echo"], "--data: the environment my.py:Echo gives its own tasks and scores"),
        (["grpo", *own, "--reward", "mi.py:score"], "mi.py: no such file; did you mean 'my.py'?"),
        (["grpo", *own, "--reward", "my.py"], "my.py' names no function; write it as "),
        (
            ["grpo", "--model", "tinny", "--data", "rows.jsonl", "--reward", "exact"],
            "tinny: neither a folder nor a hub id",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["train", *words])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and said in error, error
        assert not (place / "runs" / "demo").exists()


@pytest.mark.parametrize("length", [200, 256, 400, 999])
def test_a_template_of_one_long_line_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    from terrella.launch import task_options

    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "my.py"):
        Path(name).touch()
    text = ("Answer briefly. {{ question }} " * length)[:length]
    given = {"template": text, "data": "rows.jsonl", "reward": "my.py:score"}
    assert task_options.settings_of("grpo", given) == (
        f"env.train={json.dumps(str(tmp_path / 'rows.jsonl'))}",
        f"env.reward={json.dumps(str(tmp_path / 'my.py') + ':score')}",
        f"env.template={json.dumps(text)}",
    )


def test_the_package_is_light_and_its_names_are_there(place: Path) -> None:
    code = """import sys, terrella
assert not {"torch", "numpy", "yaml"} & set(sys.modules)
assert issubclass(terrella.Environment, object) and terrella.Invalid("why").reason == "why"
assert callable(terrella.train) and callable(terrella.evaluate) and {"train", "Environment"} <= set(dir(terrella))
assert "torch" not in sys.modules
try:
    terrella.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "module 'terrella' has no attribute 'nothing'", done.stderr


def test_what_other_processes_cannot_import_is_refused() -> None:
    import types

    from terrella.launch.task_options import path_of
    from terrella.rl.environment import Environment
    from terrella.rl.rewards.answers import exact

    assert path_of("my.py:score") == "my.py:score" and path_of(exact) == "terrella.rl.rewards.answers:exact"
    assert path_of(rows_of).endswith("test_own_task.py:rows_of") or path_of(rows_of).endswith("test_own_task:rows_of")
    notebook = types.ModuleType("notebook")
    exec("def score(prompt, answer, info): return 1.0", notebook.__dict__)
    for value, said in (
        (lambda prompt, answer, info: 1.0, "is not a name at the top of"),
        (notebook.score, "is defined in a notebook or at a prompt"),
        (Environment(), "an object of Environment cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=said):
            path_of(value)


@pytest.mark.full
@pytest.mark.timeout(4 * PATIENCE_S)
def test_an_environment_of_ones_own_survives_sigkill_bit_for_bit(place: Path) -> None:
    words = ["train", "grpo", "--model", "tiny", "--env", "my.py:Echo", "--steps", "12"]
    for setting in (
        "ranks=2",
        "stages.rl.prompts_per_step=4",
        "stages.rl.max_new_tokens=4",
        "stages.rl.checkpoint_every=3",
    ):
        words += ["--set", setting]
    words += ["--set", "stages.rl.updates_per_rollout=2", "--set", "stages.evaluate.max_new_tokens=4"]
    calm = terrella(place, *words, "--run", "runs/calm")
    assert calm.returncode == 0, calm.stdout + calm.stderr
    record = place / "runs" / "killed" / "metrics.jsonl"
    for step in (2, 7):
        started = subprocess.Popen(
            [sys.executable, "-m", "terrella", *words, "--run", "runs/killed"],
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and started.poll() is None:
            if record.exists() and len(record.read_text().splitlines()) >= step:
                break
            time.sleep(0.05)
        assert started.poll() is None, "it ended before it could be killed"
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(60)
    again = terrella(place, *words, "--run", "runs/killed", "--wait", "60")
    assert again.returncode == 0, again.stdout + again.stderr
    rows = [
        [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("calm", "killed")
    ]
    assert [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows[0]] == [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in rows[1]
    ]
    weights = [(place / "runs" / name / "export" / "model.safetensors").read_bytes() for name in ("calm", "killed")]
    assert weights[0] == weights[1]
