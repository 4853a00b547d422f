"""What the release does with `merge_sharded_ckpts.py` and `transform_vgpt_checkpoint.py`, by `terrella convert to-hf`.

Shards are real DTensors of a sharded state dict, cut as FSDP cuts them, for any number of ranks.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from terrella.models import formats
from terrella.models.config import ModelConfig
from terrella.models.video.released import write_transformer
from terrella.tests.sampling import in_turn

MODEL = ModelConfig(layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, ffn=40, vocab=4633, max_positions=512)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_transformer(MODEL, 4631, 4632, tmp_path / "base", seed=3)
    return tmp_path / "base"


def write_shards(state: dict[str, torch.Tensor], folder: Path, ranks: int) -> None:
    """One file a rank, as the video trainer saves them: every tensor cut over its first dimension, names of FSDP's
    wrappers inside.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir(parents=True)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        parts = {}
        for name, whole in state.items():
            cut = whole.chunk(ranks)
            local = cut[rank].clone() if rank < len(cut) else whole.new_empty((0, *whole.shape[1:]))
            name = name.replace(".layers.1.", ".layers.1._fsdp_wrapped_module.")
            parts[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        torch.save(parts, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 3, 4, 16])
def test_shards_of_any_count_are_joined(ranks: int, base: Path, tmp_path: Path) -> None:
    state = load_file(base / "model.safetensors")
    write_shards(state, tmp_path / "actor", ranks)
    joined = formats.read_verl_fsdp(tmp_path / "actor")
    assert joined.names == state.keys()
    assert all(torch.equal(joined.get(name), whole) for name, whole in state.items())


BOTH = """
import json, sys
from terrella.launch.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        if ended.code:
            raise
"""


@pytest.mark.timeout(1800)
@in_turn("release's commands")
def test_both_commands_write_the_folder_that_the_release_s_tools_do(base: Path, tmp_path: Path) -> None:
    state = load_file(base / "model.safetensors")
    actor, saved, config = (
        tmp_path / "global_step_150" / "actor",
        tmp_path / "checkpoint_450000",
        tmp_path / "llama_small.json",
    )
    write_shards(state, actor, 4)
    # accelerate numbers the further models of a state: the release's second one is the evaluator with its metric
    # networks
    saved.mkdir()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, saved / "model.safetensors")
    save_file({"lpips.net.slice1.0.weight": torch.ones(3)}, saved / "model_1.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (saved / name).write_bytes(b"not read")
    told = json.loads((base / "config.json").read_text()) | {"architectures": ["LlamaModel"], "torch_dtype": "float16"}
    config.write_text(json.dumps(told))
    words = [(actor, tmp_path / "merged", "--base", base), (saved, tmp_path / "unwrapped", "--base", config)]
    commands = [["convert", "to-hf", *map(str, given), "--dtype", "fp32"] for given in words]
    done = subprocess.run(
        [sys.executable, "-c", BOTH, json.dumps(commands)], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    for folder in ("merged", "unwrapped"):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
        told = json.loads((tmp_path / folder / "config.json").read_text())
        assert (told["vocab_size"], told["bos_token_id"], told["eos_token_id"]) == (4633, 4631, 4632)
