"""The `terrella shards` verbs on real folders."""

import json

import numpy as np
import pytest
import webdataset
from click.testing import CliRunner

from terrella.core.errors import ConfigError, StorageError
from terrella.data.png import decode_png
from terrella.launch.commands.shards import shards


def run(*arguments, code=0):
    result = CliRunner().invoke(shards, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def chats(tmp_path):
    lines = [{"prompt": f"question {i}", "completion": "answer " * i} for i in range(1, 9)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + "{}\n")
    return tmp_path / "chat.jsonl"


def test_make_inspect_verify_stats_head(chats, tmp_path):
    out = tmp_path / "out"
    assert "text-game" in run("make") and "rt1" in run("make")
    told = run("make", "chat", chats, out, "--dry-run")
    assert "would write 8 of 9 records" in told and "dropped 1: no messages" in told and not out.exists()
    assert "wrote 8 of 9 records" in run("make", "chat", chats, out)
    with pytest.raises(ConfigError, match="already holds"):
        run("make", "chat", chats, out)
    assert json.loads(run("make", "chat", chats, out, "--resume", "--json"))["written"] == 8
    shown = run("inspect", out, "--sample", "3")
    assert "[user] question 4" in shown and "sample 000000003" in shown
    assert run("inspect", out, "--sample", "000000003") == shown
    with pytest.raises(ConfigError, match="no sample 99; there are 8"):
        run("inspect", out, "--sample", "99")
    assert "8 samples in 1 shards, 0 already in quarantine, 0 problems" in run("verify", out)
    assert "messages.json" in run("stats", out) and json.loads(run("stats", out, "--json"))["samples"] == 8
    lines = [json.loads(line) for line in run("head", out, "-n", "3").splitlines()]
    assert [line["__key__"] for line in lines] == ["000000000", "000000001", "000000002"]
    assert run("head", out, "-n", "8", "--seed", "1") != run("head", out, "-n", "8")
    with pytest.raises(ConfigError, match="-o limit=3: converter chat has no option 'limit'; it has none"):
        run("make", "chat", chats, tmp_path / "x", "-o", "limit=3")
    with pytest.raises(ConfigError, match="write it as name=value"):
        run("make", "chat", chats, tmp_path / "x", "-o", "which")


def test_verify_tells_and_sets_aside(chats, tmp_path):
    out = tmp_path / "out"
    run("make", "chat", chats, out)
    tar = out / "shard-000000.tar"
    data = bytearray(tar.read_bytes())
    data[data.index(b"question 5")] ^= 1
    tar.write_bytes(data)
    with pytest.raises(StorageError, match="--quarantine"):
        run("verify", out)
    told = run("verify", out, "--quarantine")
    assert (
        "shard-000000.tar: sample 000000004: field messages.json: checksum differs" in told
        and "1 samples set aside" in told
    )
    assert "7 samples in 1 shards, 1 already in quarantine, 0 problems" in run("verify", out)


def test_contact_sheet(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (7, 16, 20, 3)).astype(np.uint8)
    np.savez(tmp_path / "clip.npz", image=frames, action=np.zeros((7, 2), np.float32))
    run("make", "npz", tmp_path / "clip.npz", tmp_path / "out")
    assert "frames: 7 of 16x20" in run("inspect", tmp_path / "out", "--png", tmp_path / "sheet.png")
    sheet = decode_png((tmp_path / "sheet.png").read_bytes())
    assert sheet.shape == (2 * 18, 6 * 22, 3)
    assert np.array_equal(sheet[1:17, 1:21], frames[0]) and np.array_equal(sheet[19:35, 1:21], frames[6])


def test_make_of_other_programs_shards(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "t-%06d.tar"), maxcount=4, verbose=0) as sink:
        for i in range(8):
            sink.write({"__key__": f"k{i}", "n.json": {"n": i}})
    source = f"pipe:cat {tmp_path}//t-{{000000..000001}}.tar"  # two slashes, as in a URL, stay two
    assert "wrote 8 of 8 records" in run("make", "webdataset", source, tmp_path / "out")
    assert "8 samples in 1 shards, 0 already in quarantine, 0 problems" in run("verify", tmp_path / "out")
    with pytest.raises(ConfigError, match="converter webdataset has no option 'which'"):
        run("make", "webdataset", source, tmp_path / "more", "-o", "which=all")
