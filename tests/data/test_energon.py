"""Megatron-Energon, in its own environment, reads our shards; we read a folder that it prepared.

TERRELLA_ENERGON_PYTHON names a Python that has megatron-energon; without it an environment is made, which takes
minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset

from terrella.data.shards import Reader, ShardSet, ShardWriter

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

READ = """
import json, sys
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, basic_sample_keys, get_loader, get_val_dataset, stateless

@stateless
def cook(sample):
    return dict(**basic_sample_keys(sample), n=sample["meta.json"]["n"], tokens=[int(t) for t in sample["tokens.npy"]])

class Encoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]
    def batch(self, samples):
        return samples
    def encode_batch(self, batch):
        return batch

seen = []
for rank in range(2):
    config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
    data = get_val_dataset(sys.argv[1], split_part="train", worker_config=config, batch_size=1, task_encoder=Encoder())
    seen += [(s["__key__"], int(s["n"]), [int(t) for t in s["tokens"]]) for batch in get_loader(data) for s in batch]
print(json.dumps(seen))
"""  # noqa: E501


@pytest.fixture(scope="module")
def energon(tmp_path_factory) -> Path:
    told = os.environ.get("TERRELLA_ENERGON_PYTHON")
    if told:
        return Path(told)
    folder = tmp_path_factory.mktemp("energon")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "megatron-energon==7.4.1"], check=True, timeout=1000)
    return folder / "bin" / "python"


def prepare(energon: Path, folder: Path) -> None:
    command = [str(energon.parent / "energon"), "prepare", str(folder), "--non-interactive", "--split-ratio", "1,0,0"]
    command += ["--sample-type", "CrudeWebdataset", "--no-progress", "--num-workers", "1"]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


def test_energon_reads_ours(energon, tmp_path):
    with ShardWriter(tmp_path / "d", max_samples=25) as writer:
        for i in range(100):
            writer.write({"meta.json": {"n": i}, "tokens.npy": np.arange(i % 7, dtype=np.int32)})
    prepare(energon, tmp_path / "d")
    ran = subprocess.run(
        [str(energon), "-c", READ, str(tmp_path / "d")], check=True, timeout=300, capture_output=True, text=True
    )
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(seen) == [[f"{i:09d}", i, list(range(i % 7))] for i in range(100)]


def test_we_read_a_prepared_folder(energon, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "their-%06d.tar"), maxcount=10, verbose=0) as sink:
        for i in range(30):
            sink.write({"__key__": f"k{i:03d}", "meta.json": {"n": i}, "tokens.npy": np.arange(3)})
    prepare(energon, folder)
    assert sorted(s["meta.json"]["n"] for s in Reader(ShardSet(folder), epochs=1)) == list(range(30))
