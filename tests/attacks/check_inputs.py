"""Hostile inputs to `terrella check`: user code, rows, templates, model folders, settings and recipes.

`python -m terrella.tests.attacks.check_inputs FOLDER [WORD ...]` gives each input (or those with a WORD in the name) to
the command, in a fork of one process that has everything imported, and prints a line of JSON for each: how it ended,
the seconds it took (of the clock and of a core), what it said last, and every broken promise under a name in capitals.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from terrella.tests.attacks import test_recipes

SEED = 20261117
LIMIT_S, NAMED_S, KILL_S = 60.0, 60.0, 170.0  # of a core; of the clock where the machine is idle; a hang
MOST_SAID = 17_000_000  # 16 MB of prints, and the command's own words

# a line is `name: code`; ¶ starts a new line of the body
REWARDS = """
raises: raise RuntimeError('no')
raises without a word: raise Exception
raises KeyboardInterrupt: raise KeyboardInterrupt
asserts: assert 0
hangs asleep: import time; time.sleep(1e9)
hangs busy: while True: pass
hangs in C: sum(range(10**14))
ignores signals: import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15, 10, 12)]; time.sleep(1e9)
prints 100 MB: [print('x' * 1000000) for _ in range(100)]; return 1.0
prints 100 MB to stderr: import sys; [print('x' * 1000000, file=sys.stderr) for _ in range(100)]; return 1.0
writes 100 MB to descriptor 1: import os; [os.write(1, b'x' * 1000000) for _ in range(100)]; return 1.0
prints without end: while True: print('x' * 100000)
ends with code 0: import os; os._exit(0)
ends with code 7: import os; os._exit(7)
leaves: import sys; sys.exit(0)
leaves with a text: exit('bye')
aborts: import os; os.abort()
crashes: import ctypes; ctypes.string_at(0)
kills itself: import os; os.kill(os.getpid(), 9)
stops itself: import os; os.kill(os.getpid(), 19)
nan: return float('nan')
infinite: return float('inf')
nothing: return None
text: return 'good'
huge number: return 10**400
object: return object()
list: return [1.0]
complex: return 1j
array: import numpy; return numpy.array([1, 2])
huge dict: return {str(i): 1.0 for i in range(10**6)}
dict without reward: return {'a': 1}
100 MB of bytes: return b'x' * 10**8
recursion: return score(prompt, answer, info)
memory: return len(bytearray(10**13))
closes all descriptors: import os; os.closerange(0, 1000); return 1.0
forks: import os¶if os.fork() == 0: import time; time.sleep(300)¶return 1.0
threads: import threading, time; threading.Thread(target=time.sleep, args=(1e9,)).start(); return 1.0
hangs at exit: import atexit, time; atexit.register(time.sleep, 1e9); return 1.0
changes folder: import os; os.chdir('/'); return 1.0
breaks sys: import sys; sys.modules.clear(); sys.stdout = None; return 1.0
generator: yield 1
reads input: input(); return 1.0
random: import random; return random.random()
"""
MODULES = """
import raises: raise RuntimeError('at import')
import hangs: import time; time.sleep(1e9)
import ends the process: import os; os._exit(0)
import leaves: import sys; sys.exit(0)
import prints 100 MB: [print('x' * 1000000) for _ in range(100)]¶def score(p, a, i): return 1.0
syntax error: def score(:
empty:
binary: \0\1\2
not UTF-8: \udcff\udcfe
tabs: def score(p, a, i):¶\tif 1:¶        return 1
a number: score = 3
needs a package: import no_such_package¶def score(p, a, i): return 1.0
no arguments: def score(): return 1.0
imports itself: from own import *
deep nesting: x = DEEP
class: class score: pass
"""
TASKS = "return list('abcdef' if split == 'train' else 'xyz')"
PLAY = "answer = yield f'Say {task}'; return float(answer.startswith(task))"
LISTS = """
raise: raise OSError('no')
hang: import time; time.sleep(1e9)
without end: import itertools; return itertools.count()
ten million: return list(range(10**7))
nothing: return None
end the process: import os; os._exit(0)
print: [print('x'*10**6) for _ in range(100)]; return list('abcdef' if split == 'train' else 'xyz')
cannot be pickled: return [lambda: 0]
one of 100 MB: return ['x' * 10**8]
surrogates: return ['\\ud800']
the same in both splits: return ['a', 'b']
random: import random; return [random.random() for _ in range(4)]
"""
PLAYS = """
hangs: import time; time.sleep(1e9); yield
hangs after the answer: yield 'x'¶while True: pass
ends the process: import os; os._exit(0); yield
raises: raise ValueError('x'); yield
yields nothing: yield None; return 1.0
yields a number: yield 3; return 1.0
yields 100 MB: yield 'x' * 10**8; return 1.0
never yields: return 1.0¶yield
is a function: return 1.0
without end: while True: yield 'again'
gives nan: yield 'x'; return float('nan')
prints: [print('x'*10**6) for _ in range(10)]; yield 'x'; return 1.0
prints without end: while True: print('x' * 10**6)¶yield
stops itself: import os; os.kill(os.getpid(), 19); yield 'x'
random prompt: import random; yield str(random.random()); return 1.0
"""
METHODS = """
made with a hang: def __init__(self): import time; time.sleep(1e9)
made with an error: def __init__(self): 1/0
demonstration hangs: def demonstration(self, task): import time; time.sleep(1e9)
baselines hang: def baselines(self): import time; time.sleep(1e9)
a baseline ends the process: def baselines(self): import os; return {'x': lambda p, t: os._exit(0)}
"""
IN_RANKS = """
hangs: import time; time.sleep(1e9)
ends the process: import os; os._exit(0)
prints: [print('x' * 10**6) for _ in range(100)]¶1/0
raises: 1/0
"""
TEMPLATES = """
endless: {% for i in range(10**9) %}x{% endfor %}
power: {{ 9**9**9 }}
classes: {{ ''.__class__.__mro__[1].__subclasses__() }}
syntax: {{
recursion: {% macro a() %}{{ a() }}{% endmacro %}{{ a() }}
repeat: {{ 'x' * 10**10 }}
include: {% include '/etc/passwd' %}
missing: {{ nothing }}
nested range: {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
empty:
"""
DATA = [
    "fifo",
    "loop",
    "circle",
    "empty.jsonl",
    "big.jsonl",
    "nul.jsonl",
    "deep.json",
    "many",
    "/dev/zero",
    "/dev/full",
]
DATA += ["/dev/stdin", "/proc/self", "/proc/kmsg", "no/such", "a\0b", "x" * 5000, "tiny", "/", "~", "*.jsonl", ""]
MODELS = ["fifo", "/dev/zero", "loop", "/", "owner/name", "owner/name@" + "0" * 40, "", "../..", "rows.jsonl"]
RUNS = ["/dev/null", "/proc/x", "rows.jsonl", "loop", "x" * 300, "a\nb", "/", ""]
CONFIGS = {
    "no layers": {"num_hidden_layers": 0},
    "a billion layers": {"num_hidden_layers": 10**9},
    "huge vocabulary": {"vocab_size": 10**15},
    "negative": {"hidden_size": -32},
    "text": {"hidden_size": "many"},
    "nan": {"rms_norm_eps": float("nan")},
    "list": {"num_attention_heads": [2]},
    "code": {"auto_map": {"AutoModelForCausalLM": "x.Y"}},
    "gptq": {"quantization_config": {"quant_method": "gptq"}},
    "unknown type": {"model_type": "zebra"},
    "another vocabulary": {"vocab_size": 7},
}
SETTINGS = """
stages.rl.steps=.nan
stages.rl.steps=-1
stages.rl.steps=NINES
ranks=0
ranks=1000000000
seed=-1
seed=NINES
model.layers=999999999999
stages.rl.algorithm={kind: []}
stages.rl.prompts_per_step=0
env.deadline_s=.inf
env.deadline_s=-1
stages=[]
stages={}
a=b
=
stages.rl=null
parallel.tensor=0
stages.rl.optimizer.lr=1e400
env.kind=../../x.py:y
name=../../x
stages.rl.max_new_tokens=1000000000
"""
RECIPES = {
    "alias bomb": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 13)),
    "self alias": "name: &a [*a]\n",
    "deep": "a: " + "[" * 20000,
    "empty": "",
    "binary": "\0",
    "tab": "\t",
    "list": "- 1\n",
    "kind is a list": "name: x\nstages:\n- {kind: [], name: a}\n",
    "python tag": "!!python/object/apply:os.system ['id']",
    "a million lines": "a: 1\n" * 10**6,
}
NAMES = ["fifo", "/dev/zero", "loop", "tiny", "no-such", "/etc/passwd", "-", "a\0b", ""]
CHANGED = 40  # recipes of the package, changed by a seeded draw: some of them are still valid
# what may pass: each is worth a number in time, whatever else it does, or is a folder's true name
HARMLESS = (
    *(f"reward: {name}" for name in ("prints 100 MB", "prints 100 MB to stderr", "writes 100 MB to descriptor 1")),
    *(f"reward: {name}" for name in ("forks", "threads", "hangs at exit", "changes folder", "random", "breaks sys")),
    *("reward: import prints 100 MB", "env: tasks: print", "env: play: prints", "run: 'a\\nb'"),
    # `check env` refuses them; RL asks for none
    *(f"grpo env: {name}" for name in ("demonstration hangs", "baselines hang")),
    "grpo env: a baseline ends the process",
)


def pairs(text: str) -> list[tuple[str, str]]:
    """Names and what they stand for, of a table above."""
    lines = [line.partition(": ") for line in text.split("\n") if line]
    return [(name.rstrip(":"), code.replace("DEEP", "(" * 5000 + ")" * 5000)) for name, _, code in lines]


class Place:
    """A folder with a model, rows and everything that the inputs name, and the inputs: (name, words of the command)."""

    def __init__(self, root: Path) -> None:
        self.root, self.cases = root, list[tuple[str, list[str]]]()
        self._files()
        check = ["check", "grpo", "--model", "tiny", "--data", "rows.jsonl", "--template", "{{ question }}="]
        few, ok = ["--set", "stages.rl.max_new_tokens=4"], ["--reward", "ok.py:score"]
        for name, code in pairs(REWARDS):
            body = f"def score(prompt, answer, info):\n    {code}".replace("¶", "\n    ")
            self.case(f"reward: {name}", *check, *few, "--reward", self.own(body))
        for name, code in pairs(MODULES):
            self.case(f"reward: {name}", *check, *few, "--reward", self.own(code.replace("¶", "\n")))
        environments = [(f"tasks: {name}", (code, PLAY, "")) for name, code in pairs(LISTS)]
        environments += [(f"play: {name}", (TASKS, code, "")) for name, code in pairs(PLAYS)]
        environments += [(name, (TASKS, PLAY, code)) for name, code in pairs(METHODS)]
        for name, (tasks, play, more) in environments:
            head = (
                f"from terrella import Environment\nclass score(Environment):\n    {more}\n    def tasks(self, split):"
            )
            body = f"¶{tasks}\n    def play(self, task):¶{play}".replace("¶", "\n        ")
            self.case(f"env: {name}", "check", "env", self.own(head + body))
            self.case(f"grpo env: {name}", "check", "grpo", "--model", "tiny", "--env", self.own(head + body), *few)
        for name, code in pairs(IN_RANKS):
            own = self.own(code.replace("¶", "\n"))
            self.case(f"algorithm: {name}", *check, *ok, "--set", f"stages.rl.algorithm={{kind: '{own}'}}")
            recipe = f"name: own\nmodel: {{path: tiny}}\nstages:\n- {{kind: '{own}', name: first}}\n"
            self.case(f"stage: {name}", "check", self.recipe(recipe))
        for data in DATA:
            self.case(f"data: {data[:20]!r}", *check[:4], "--data", data, *check[6:], *ok)
        for name, template in pairs(TEMPLATES):
            self.case(f"template: {name}", *check[:7], template, *ok, *few)
        self._models(check, ok)
        for run in RUNS:
            self.case(f"run: {run[:12]!r}", *check, *few, *ok, "--run", run)
        for setting in SETTINGS.strip().split("\n"):
            self.case(f"set: {setting}", *check, *few, *ok, "--set", setting.replace("NINES", "9" * 5000))
        self._recipes()

    def case(self, name: str, *words: str) -> None:
        self.cases.append((name, list(words)))

    def own(self, code: str) -> str:
        """A file of the user's with this code, named as in a recipe."""
        folder = self.root / f"own{len(list(self.root.glob('own*')))}"
        folder.mkdir()
        (folder / "own.py").write_text(code + "\n", encoding="utf-8", errors="surrogateescape")
        return f"{folder.name}/own.py:score"

    def recipe(self, text: str) -> str:
        path = self.root / f"recipe{len(self.cases)}.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        return path.name

    def _files(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from terrella.data.tokenizers import MARK, ByteTokenizer

        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 48, "vocab_size": 260, "max_position_embeddings": 64}
        config = AutoConfig.for_model("qwen2", **sizes, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(self.root / "tiny")
        ByteTokenizer().save(self.root / "tiny")
        (self.root / "tiny" / MARK).unlink()
        rows = "".join(f'{{"question": "{n}+{n}", "answer": {2 * n}}}\n' for n in range(10))
        texts = {"rows.jsonl": rows, "ok.py": "def score(prompt, answer, info): return len(answer) / 100\n"}
        texts |= {"empty.jsonl": "", "big.jsonl": f'{{"question": "{"x" * 50_000_000}", "answer": 1}}\n'}
        texts |= {"nul.jsonl": "\0" * 1000, "deep.json": "[" * 100_000}
        for name, text in texts.items():
            (self.root / name).write_text(text)
        os.mkfifo(self.root / "fifo")
        (self.root / "loop").symlink_to("loop")
        (self.root / "circle").mkdir()
        (self.root / "circle" / "again").symlink_to(".")
        (self.root / "many").mkdir()
        for number in range(2000):
            (self.root / "many" / f"{number}.jsonl").write_text("{}\n")

    def _models(self, check: list[str], ok: list[str]) -> None:
        config = json.loads((self.root / "tiny" / "config.json").read_text())
        weights = (self.root / "tiny" / "model.safetensors").read_bytes()
        files = {f"config: {name}": ("config.json", json.dumps({**config, **new})) for name, new in CONFIGS.items()}
        files |= {"config []": ("config.json", "[]"), "config deep": ("config.json", "[" * 100_000)}
        files |= {"tokenizer cut": ("tokenizer.json", "{"), "no tokenizer": ("tokenizer.json", None)}
        bits: dict[str, tuple[str, bytes | None]] = {
            "config binary": ("config.json", random.Random(SEED).randbytes(1000)),
            "no weights": ("model.safetensors", None),
            "weights cut": ("model.safetensors", weights[:500]),
            "weights of 2^63 bytes": ("model.safetensors", (2**63).to_bytes(8, "little") + weights[8:]),
            "weights empty": ("model.safetensors", b""),
        }
        bits |= {name: (file, None if text is None else text.encode()) for name, (file, text) in files.items()}
        for name, (file, content) in bits.items():
            folder = Path(shutil.copytree(self.root / "tiny", self.root / f"model{len(self.cases)}"))
            (folder / file).unlink()
            if content is not None:
                (folder / file).write_bytes(content)
            self.case(f"model: {name}", *check[:3], folder.name, *check[4:], *ok)
        for name in MODELS:
            self.case(f"model: {name!r}", *check[:3], name, *check[4:], *ok)

    def _recipes(self) -> None:
        for number in range(CHANGED):
            draw = random.Random(f"{SEED}/{number}")
            text = test_recipes.changed(draw.choice(test_recipes.texts()), draw)
            self.case(f"changed recipe {number}", "check", self.recipe(text))
        for name, text in RECIPES.items():
            self.case(f"recipe: {name}", "check", self.recipe(text))
        for name in NAMES:
            self.case(f"recipe name: {name!r}", "check", name)


def play(root: Path, name: str, words: list[str]) -> dict[str, object]:
    """One input, in a fork: how the command ended, and which promises it broke."""
    log, begun = root / "log", time.monotonic()
    child = os.fork()
    if child == 0:
        _command(root, log, words)
    code, core_s = None, 0.0
    while code is None and time.monotonic() - begun < KILL_S:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            code, core_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        else:
            time.sleep(0.05)
    took = time.monotonic() - begun
    left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == child]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    size = log.stat().st_size
    text = log.read_bytes()[-20_000:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = " / ".join([*(line for line in lines if line.startswith("fail")), *lines[-1:]])
    broken_promises = {
        "HANG": code is None,
        "KILLED": code is not None and code < 0,
        "SILENT": code == 0 and not {name, name.removeprefix("grpo ")} & set(HARMLESS) and "changed" not in name,
        "UNNAMED": "Traceback" in text or code in (10, 99) or (code not in (0, None) and "rror: " not in last),
        "SLOW": core_s > LIMIT_S or (took > NAMED_S and os.getloadavg()[0] <= (os.cpu_count() or 1)),
        "FLOOD": size > MOST_SAID,
        "LEFT BEHIND": bool(left) and code is not None,
    }
    broken = [promise for promise, is_broken in broken_promises.items() if is_broken]
    return {
        "name": name,
        "code": code,
        "s": round(took, 1),
        "core_s": round(core_s, 1),
        "broken": broken,
        "last": last[-600:],
    }


def _command(root: Path, log: Path, words: list[str]) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(root)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from terrella.launch import cli

        cli.main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _session(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return None


def main() -> None:
    """Import what a check needs once, then play."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    from terrella.launch.commands import check, check_env, check_preview, check_recipe  # noqa: F401
    from terrella.launch.stages import collect, eval, export, own, rl, sft, start, verbs  # noqa: F401
    from terrella.models import hf  # noqa: F401
    from terrella.rl.rollout import embedded  # noqa: F401

    root = Path(sys.argv[1]).resolve()
    for name, words in Place(root).cases:
        if not sys.argv[2:] or any(word in name for word in sys.argv[2:]):
            print(json.dumps(play(root, name, words)), flush=True)


if __name__ == "__main__":
    main()
