"""What a golden file holds of a run, and how another run differs from it. Helper module, not a test."""

import hashlib
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terrella.core.metrics import MetricsFile

FILES = Path(__file__).parent / "files"
CLOCK = "time/"  # what is measured by a clock differs between equal runs
# On another platform. Seen in ten cases with torch's plain kernels in place of AVX512: after 100 steps of training the
# KL divergence of case sokoban moves by 2.1e-2; in cases of a few steps, values above ABSOLUTE move by 1.2e-5 at most.
RELATIVE, ABSOLUTE = 5e-2, 1e-5


def this_platform() -> dict[str, str]:
    """What decides the last bit of a result: equal platforms give equal digests."""
    import numpy
    import torch

    told = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    )
    told = {key.strip(): value.strip() for key, value in told.items()}
    # Intel and AMD, Arm
    names = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU revision")
    part = ", ".join(f"{name} {told[name]}" for name in names if name in told)
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "machine": platform.machine(),
        "cpu": f"{part}, {capability}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def comparable(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics without what a clock measured: they are equal between equal runs."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value, by their path; clock values are left out."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not key.startswith(CLOCK):
                yield from flat(item, f"{path}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            # a table's row or an episode has a name, which tells more than its number
            yield from flat(item, f"{path}/{item['name'] if isinstance(item, dict) and 'name' in item else number}")
    else:
        yield path, value


def digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def observe(run: Path) -> dict[str, dict[str, Any]]:
    """Digests of a run's metrics, stage outcomes, tables, kept rollouts and exported tensors, and the numbers behind
    them.
    """
    from safetensors.numpy import load_file

    values: dict[str, Any] = {}
    digests: dict[str, str] = {}
    rows = comparable(MetricsFile(run / "metrics.jsonl").rows())
    digests["metrics"] = digest(rows)
    for row in rows:
        values |= flat(
            {k: v for k, v in row.items() if k not in ("stage", "step")}, f"metrics/{row['stage']}/{row['step']}"
        )
    for folder in ("stages", "results"):
        for path in sorted((run / folder).glob("*.json")):
            if path.stem.endswith("-time"):  # a table of where the time went
                continue
            told = json.loads(path.read_text(encoding="utf-8"))
            if folder == "results":  # their words may be put better; their figures may not
                told = {key: told[key] for key in ("columns", "rows")}
            leaves = dict(flat(told, f"{folder}/{path.stem}"))
            digests[f"{folder}/{path.stem}"] = digest(leaves)
            values |= leaves
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        digests[f"rollouts/{path.stem}"] = digest(path.read_bytes())
    for path in sorted((run / "export").glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digests[f"export/{name}"] = digest(str((tensor.dtype, tensor.shape)).encode() + tensor.tobytes())
            values[f"export/{name}"] = float((tensor.astype("float64") ** 2).sum() ** 0.5)
    return {"digests": digests, "values": values}


def differences(
    golden: dict[str, Any], found: dict[str, Any], exact: bool, unsteady: tuple[str, ...] = ()
) -> list[str]:
    """One line for each key that differs: the values first, as they tell more, then digests.

    Not `exact`, on another platform, numbers may differ within the tolerances, and those under the keys `unsteady` as
    they will.
    """
    lines = []
    for part in ("values", "digests") if exact else ("values",):
        before, now = golden[part], found[part]
        for key in [*before, *(key for key in now if key not in before)]:
            free = not exact and key.startswith(unsteady)
            if not (key in before and key in now and (free or _same(before[key], now[key], exact))):
                lines.append(
                    f"{part}: {key}: {before.get(key, 'absent')!r} in the golden file, {now.get(key, 'absent')!r} now"
                )
    return lines


def unsteady_keys(config: Any) -> tuple[str, ...]:
    """The keys of stages behind a video tokenizer: a code that rounds the other way on another platform changes
    every later number, and how many codes are used.
    """
    if getattr(config.env, "layout", None) is None:
        return ()
    names = [stage.name for stage in config.stages]
    later = names[names.index(config.env.data) + 1 :]
    codes = [f"stages/{name}/heldout/codes_used" for name in names]
    codes += [f"results/{name}/rows/tokenizer/cells/3" for name in names]
    return ("export/", *codes, *(f"{part}/{name}" for part in ("metrics", "stages", "results") for name in later))


def _same(before: Any, now: Any, exact: bool) -> bool:
    if before != before and now != now:  # NaN: a table's cell without a sample
        return True
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, now))
    if exact or not numbers:
        return before == now
    return math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
