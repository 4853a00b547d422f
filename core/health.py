"""Signs of life of a rank, and checks of a machine and of a process group before work is given to them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from .errors import TerrellaError
from .files import write_json

BEAT_S = 20.0
PLAIN_NETWORK = 12.5e9  # bytes/s of 100 Gb Ethernet, far below any GPU interconnect
SLOW_LINK = 0.5  # of the median rank's speed: below it a rank is called slow


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it stands, and what to do about it."""

    level: Literal["ok", "warn", "fail"]
    what: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:4}  {self.what}: {self.text}" + (f" -> {self.fix}" if self.fix else "")


class Heartbeat:
    """A thread that writes where this rank's main thread is, so that a stuck run tells which rank waits for what."""

    def __init__(self, path: Path, allowed: Callable[[], bool], every_s: float = BEAT_S) -> None:
        self.path, self.allowed, self.every_s = path, allowed, every_s
        self.main = threading.main_thread().ident or 0
        self.at, self.since = "", time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def beat(self) -> None:
        """Write one sign of life, unless the run belongs to somebody else by now."""
        at = operation(sys._current_frames().get(self.main))
        if at != self.at:
            self.at, self.since = at, time.time()
        if self.allowed():
            write_json(
                self.path,
                {"at": at, "since": self.since, "time": time.time(), "host": os.uname().nodename, "pid": os.getpid()},
            )

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            try:
                self.beat()
            except (OSError, TerrellaError):
                continue  # a full disk is reported by those who must write


def operation(frame: FrameType | None) -> str:
    """The innermost call, and the innermost line of this project that leads to it."""
    if frame is None:
        return "ended"
    inner, root = frame, str(Path(__file__).parents[1])
    ours = frame
    while ours.f_back is not None and not ours.f_code.co_filename.startswith(root):
        ours = ours.f_back
    place = f"{Path(ours.f_code.co_filename).name}:{ours.f_code.co_name}:{ours.f_lineno}"
    return place if inner is ours else f"{place} in {inner.f_code.co_name}"


def machine(folder: Path) -> list[Check]:
    """Disk, memory, shared memory and limits of this host."""
    found = []
    folder = _existing(folder)
    disk = shutil.disk_usage(folder)
    level = "fail" if disk.free < 2e9 else "warn" if disk.free < 20e9 else "ok"
    fix = "" if level == "ok" else "free space, or put the run elsewhere with --run"
    found.append(Check(level, "disk", f"{disk.free / 1e9:.0f} of {disk.total / 1e9:.0f} GB free at {folder}", fix))
    memory = psutil.virtual_memory()
    low = memory.available < 2e9
    found.append(
        Check(
            "warn" if low else "ok",
            "memory",
            f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB free",
            "end other programs" if low else "",
        )
    )
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").free
        small = size < 1e9
        fix = "start the container with a larger --shm-size" if small else ""
        found.append(Check("warn" if small else "ok", "shared memory", f"{size / 1e9:.1f} GB free in /dev/shm", fix))
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    busy = load > 2
    fix = "other programs use the machine; times will not be comparable" if busy else ""
    found.append(Check("warn" if busy else "ok", "cpu", f"{os.cpu_count()} cores, load {load:.1f} a core", fix))
    return found


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


GPU_FIELDS = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "pstate",
)


def gpus() -> list[Check]:
    """What nvidia-smi says of each GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except FileNotFoundError:
        return [Check("ok", "gpu", "no NVIDIA driver here; runs train on the CPU")]
    except subprocess.TimeoutExpired:
        return [
            Check("fail", "gpu", "nvidia-smi did not answer within 30 s", "the driver hangs: drain and reboot the node")
        ]
    if answer.returncode:
        return [
            Check(
                "fail",
                "gpu",
                answer.stdout.strip() or answer.stderr.strip(),
                "drain the node and look at dmesg for Xid errors",
            )
        ]
    return [judge_gpu(line) for line in answer.stdout.strip().splitlines()]


def judge_gpu(line: str) -> Check:
    """One row of nvidia-smi's answer."""
    index, name, total, used, heat, errors, state = (part.strip() for part in line.split(","))
    known = used.isdigit() and total.isdigit()  # not of GPUs that share the machine's memory
    memory = f"{float(used) / 1024:.1f} of {float(total) / 1024:.0f} GiB used, " if known else ""
    what, text = f"gpu {index}", f"{name}, {memory}{heat} C, {state}"
    if errors.isdigit() and int(errors) > 0:
        return Check(
            "fail",
            what,
            f"{text}, {errors} uncorrected memory errors",
            "drain the node; the GPU must be reset or replaced",
        )
    if heat.isdigit() and int(heat) >= 88:
        return Check("warn", what, text, "it is throttling: check the cooling")
    if known and float(used) > 0.05 * float(total):
        return Check("warn", what, text, "another program holds memory: nvidia-smi shows its process")
    return Check("ok", what, text)


# what NVIDIA's driver writes into the kernel's log of a GPU that must be reset or replaced; other numbers are mostly
# errors of programs
XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")
BROKEN = {48, 62, 64, 74, 79, 92, 95, 119, 120, 140, 143}
DIAGNOSIS_S = 300.0


def xids(log: str) -> list[Check]:
    """What the kernel's log tells of each GPU since the machine was started."""
    seen: dict[str, set[int]] = {}
    for place, number in XID.findall(log):
        seen.setdefault(place, set()).add(int(number))
    found = []
    for place, numbers in seen.items():
        bad = numbers & BROKEN
        text = f"Xid {', '.join(map(str, sorted(bad or numbers)))} in the kernel's log"
        fix = "drain the node; the GPU must be reset or replaced" if bad else "an error of a program, most likely"
        found.append(Check("fail" if bad else "warn", f"gpu at {place}", text, fix))
    return found or [Check("ok", "xid", "the kernel's log has no errors of GPUs")]


def kernel_log() -> list[Check]:
    """Xid errors, where this user may read the kernel's log."""
    try:
        answer = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Check("ok", "xid", f"not looked for: dmesg: {error}")]
    if answer.returncode:
        return [Check("ok", "xid", f"not looked for: {answer.stderr.strip()}")]
    return xids(answer.stdout)


def dcgm() -> Check:
    """NVIDIA's short diagnosis, where DCGM is installed."""
    try:
        answer = subprocess.run(["dcgmi", "diag", "-r", "1"], capture_output=True, text=True, timeout=DIAGNOSIS_S)
    except FileNotFoundError:
        return Check("ok", "dcgm", "not installed here; its diagnosis was not made")
    except subprocess.TimeoutExpired:
        return Check("fail", "dcgm", f"dcgmi diag gave no answer within {DIAGNOSIS_S:.0f} s", "drain the node")
    if "Unable to connect to host engine" in answer.stdout + answer.stderr:  # which says nothing of the GPUs
        return Check(
            "warn", "dcgm", "its nv-hostengine does not answer; the diagnosis was not made", "start its service"
        )
    wrong = [" ".join(line.strip("| ").split()) for line in answer.stdout.splitlines() if "Fail" in line]
    if answer.returncode or wrong:
        text = "; ".join(wrong) or answer.stderr.strip() or f"dcgmi diag ended with code {answer.returncode}"
        return Check("fail", "dcgm", text, "`dcgmi diag -r 3` tells more; drain the node")
    return Check("ok", "dcgm", "the short diagnosis passed")


def matmul() -> Check:
    """A product that every healthy device gets right: a silent arithmetic fault shows here."""
    import torch

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (512, 512), generator=generator).float()
    exact = (a.double() @ a.double()).float()
    wrong = int((a.to(device) @ a.to(device)).cpu().ne(exact).sum())
    if wrong:
        return Check(
            "fail",
            "arithmetic",
            f"{wrong} of {exact.numel()} entries of an integer product are wrong on {device}",
            "drain the node",
        )
    return Check("ok", "arithmetic", f"an integer product is exact on {device}")


def links(size_mib: int | None = None) -> Check:
    """All-reduce speed of the joined ranks; every rank must call it, and every rank gets the same verdict."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    size = (size_mib or (256 if cuda else 4)) * 2**20
    data = torch.ones(size // 4, device="cuda" if cuda else "cpu")
    dist.all_reduce(data)
    start = time.monotonic()
    for _ in range(3):
        dist.all_reduce(data)
    if cuda:
        torch.cuda.synchronize()
    ranks = dist.get_world_size()
    bandwidth = 3 * 2 * (ranks - 1) / ranks * size / (time.monotonic() - start)
    speeds: list[float] = [0.0] * ranks
    dist.all_gather_object(speeds, bandwidth)
    typical = sorted(speeds)[ranks // 2]
    slow = [rank for rank, speed in enumerate(speeds) if speed < SLOW_LINK * typical]
    text = f"all-reduce over {ranks} ranks: {typical / 1e9:.2f} GB/s bus bandwidth"
    if slow:
        return Check(
            "warn", "links", f"{text}; ranks {slow} below half of it", "check the network of those ranks' nodes"
        )
    if cuda and typical < PLAIN_NETWORK:
        fix = "NCCL seems to use TCP: name the fast network with --interface, look for InfiniBand with NCCL_DEBUG=INFO"
        return Check("warn", "links", f"{text}, as slow as a plain network", fix)
    return Check("ok", "links", text)


def timed_product() -> float:
    """Seconds of a fixed product on this rank's device, the best of three, so that a passing load does not count."""
    import torch

    cuda = torch.cuda.is_available()
    a = torch.ones(4096 if cuda else 256, 4096 if cuda else 256, device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(4):  # the first one warms up
        start = time.monotonic()
        for _ in range(10):
            a @ a
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - start)
    return best


def pace() -> Check:
    """The same arithmetic timed on every rank: one slow GPU or busy host holds all the others up. Every rank must
    call it.
    """
    import torch.distributed as dist

    took: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(took, timed_product())
    slow = stragglers(took, floor_s=0.2 * min(took))
    if slow:
        return Check(
            "warn",
            "pace",
            f"ranks {slow} compute much slower than the others",
            "drain their nodes or look for other programs there",
        )
    return Check("ok", "pace", f"{len(took)} ranks compute equally fast")


def stragglers(seconds: list[float], floor_s: float = 0.05) -> list[int]:
    """Ranks that took half as long again as the median rank for the same work; of two ranks, as the other."""
    typical = sorted(seconds)[len(seconds) // 2 if len(seconds) > 2 else 0]
    return [rank for rank, took in enumerate(seconds) if took > 1.5 * typical and took - typical > floor_s]
