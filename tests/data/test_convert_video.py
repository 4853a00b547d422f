"""Video episodes come back bit-equal; TFRecord is read without TensorFlow."""

import hashlib
import importlib.util
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError
from terrella.data.convert import convert
from terrella.data.convert.rt1 import ACTION_PARTS
from terrella.data.errors import ShardError
from terrella.data.png import decode_png, encode_png
from terrella.data.preview import contact_sheet, describe
from terrella.data.shards import ShardSet
from terrella.data.shards.verify import verify
from terrella.data.tfrecord import crc32c, masked, parse_example, read_records
from terrella.tests.data.helpers import episode_views

SHARED = os.environ.get("TERRELLA_SHARED_DATA")
needs_shared = pytest.mark.skipif(not SHARED, reason="TERRELLA_SHARED_DATA is not set: the public data is not here")


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, 3, 4]), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_png_round_trip(height, width, channels, seed):
    shape = (height, width) if channels is None else (height, width, channels)
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    assert np.array_equal(decode_png(encode_png(image)), image)


def test_png_filters_of_other_writers():
    """Every row filter of the format, against rows filtered here by definition."""
    import zlib

    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (5, 4, 3)).astype(int)
    rows = b""
    for y in range(5):
        line = [y]  # filter 0 to 4
        for x in range(4):
            for c in range(3):
                left = image[y, x - 1, c] if x else 0
                up = image[y - 1, x, c] if y else 0
                corner = image[y - 1, x - 1, c] if x and y else 0
                base = left + up - corner
                paeth = min((abs(base - left), 0, left), (abs(base - up), 1, up), (abs(base - corner), 2, corner))[2]
                line.append((image[y, x, c] - [0, left, up, (left + up) // 2, paeth][y]) % 256)
        rows += bytes(int(v) for v in line)

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 4, 5, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert np.array_equal(decode_png(data), image)
    with pytest.raises(ValueError, match="chunk IDAT is damaged"):
        decode_png(data[:60] + bytes([data[60] ^ 1]) + data[61:])


def test_a_png_that_claims_or_holds_too_much():
    def png(width, height, pixels):
        head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
        parts = [(b"IHDR", head), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
        body = b"".join(struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in parts)
        return b"\x89PNG\r\n\x1a\n" + body

    bomb = png(4, 4, bytes(300 << 20))  # 300 kB that would become 300 MB
    tracemalloc.start()
    with pytest.raises(ValueError, match="4 x 4 pixels holds more of them"):
        decode_png(bomb)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    for width, height in ((1 << 31, 1 << 31), (0, 5), (1 << 20, 1 << 20)):
        with pytest.raises(ValueError, match="at most 67108864 are read"):
            decode_png(png(width, height, b"0"))
    with pytest.raises(ValueError, match="holds fewer"):
        decode_png(png(4, 4, b"0"))


def test_npz_episodes(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "episodes"
    folder.mkdir()
    kept = {}
    for i in range(3):
        image = rng.integers(0, 256, (4, 6, 8, 3))
        kept[i] = image = image if i else image.astype(np.uint8)
        np.savez_compressed(
            folder / f"train_eps_{i:08d}.npz", image=image, action=rng.normal(size=(4, 13)).astype(np.float32)
        )
    np.savez(folder / "train_eps_00000003.npz", image=rng.normal(size=(4, 6, 8, 3)))
    np.savez(folder / "train_eps_00000004.npz", depth=np.zeros(3))
    np.savez(folder / "train_eps_00000005.npz", image=np.array([{}], dtype=object), allow_pickle=True)
    report = convert("npz", folder, tmp_path / "out")
    assert report.written == 3 and report.dropped == {"not a usable episode": 3}
    assert any("pickle" in e.lower() for e in report.examples["not a usable episode"])
    shards = ShardSet(tmp_path / "out")
    for i in range(3):
        found = episode_views(shards[i])["image"]
        assert found.dtype == kept[i].dtype and np.array_equal(found, kept[i])
    assert convert("npz", folder, None, split="test").written == 1
    assert convert("npz", folder, None, split="train").written == 2


def test_webp_is_lossless_too(tmp_path):
    pytest.importorskip("PIL")
    clip = np.random.default_rng(0).integers(0, 256, (3, 16, 20, 3)).astype(np.uint8)
    np.savez(tmp_path / "clip.npz", image=clip)
    convert("npz", tmp_path / "clip.npz", tmp_path / "out", frames="webp")
    sample = ShardSet(tmp_path / "out")[0]
    assert sample["frames.0000.webp"][:4] == b"RIFF" and np.array_equal(episode_views(sample)["image"], clip)
    assert contact_sheet(sample).shape == (18, 3 * 22, 3)
    with pytest.raises(ConfigError, match="frames='gif'"):
        convert("npz", tmp_path / "clip.npz", None, frames="gif")


def test_arrays_without_numbers_are_shown():
    words, dates = np.array(["up", "down"]), np.array(["2026-01-02"], "datetime64[D]")
    shown = list(describe({"__key__": "a", "words.npy": words, "dates.npy": dates, "ids.npy": np.arange(3)}))
    assert shown[1:] == [
        "  words.npy: <U4 [2]  up down",
        "  dates.npy: datetime64[D] [1]  2026-01-02",
        "  ids.npy: int64 [3]  0 1 2",
    ]


def test_our_png_is_read_by_pillow_and_theirs_by_us():
    Image = pytest.importorskip("PIL.Image")
    import io

    image = (np.add.outer(np.arange(30), np.arange(40))[..., None] * [1, 2, 3] % 256).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image)
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, format="PNG", optimize=True)
    assert np.array_equal(decode_png(stream.getvalue()), image)


@needs_shared
@pytest.mark.parametrize("name", ["fractal_sample", "bair_sample"])
def test_public_clips_come_back_bit_equal(tmp_path, name):
    path = Path(SHARED) / "rt1" / f"{name}.npz"
    report = convert("npz", path, tmp_path / "out")
    assert report.written == 1 and not verify(tmp_path / "out").problems
    sample = ShardSet(tmp_path / "out")[0]
    with np.load(path, allow_pickle=False) as held:
        views = episode_views(sample)
        assert set(views) == {k for k in held.files if k.endswith("image")}
        for view, frames in views.items():
            assert frames.dtype == held[view].dtype and np.array_equal(frames, held[view])
        if "action" in held.files:
            assert sample["actions.npy"].dtype == held["action"].dtype and np.array_equal(
                sample["actions.npy"], held["action"]
            )


def test_checksum_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8).tobytes()
    slow = 0xFFFFFFFF
    for byte in data:
        slow ^= byte
        for _ in range(8):
            slow = (slow >> 1) ^ (0x82F63B78 if slow & 1 else 0)
    assert crc32c(data) == slow ^ 0xFFFFFFFF


def varint(n):
    n &= (1 << 64) - 1
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number, body):
    return varint(number << 3 | 2) + varint(len(body)) + body


def example(features, packed=True):
    """A serialized tf.train.Example by the definition of the format."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], bytes):
            body = field(1, b"".join(field(1, v) for v in values))
        elif isinstance(values[0], float):
            floats = [struct.pack("<f", v) for v in values]
            body = field(2, field(1, b"".join(floats)) if packed else b"".join(varint(1 << 3 | 5) + f for f in floats))
        else:
            body = field(
                3,
                field(1, b"".join(map(varint, values)))
                if packed
                else b"".join(varint(1 << 3) + varint(v) for v in values),
            )
        entries += field(1, field(1, name.encode()) + field(2, body))
    return field(1, entries)


def record(data):
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(crc32c(head))) + data + struct.pack("<I", masked(crc32c(data)))


@pytest.mark.parametrize("packed", [True, False])
def test_examples(packed):
    got = parse_example(example({"b": [b"x", b""], "f": [1.5, -2.0], "i": [3, -4, 1 << 40]}, packed))
    assert got["b"] == [b"x", b""] and got["f"].tolist() == [1.5, -2.0] and got["i"].tolist() == [3, -4, 1 << 40]
    assert got["f"].dtype == np.float32 and got["i"].dtype == np.int64


def rt1_record(frames, rng):
    features = {
        "steps/observation/image": [encode_png(f) for f in frames],
        "steps/observation/natural_language_instruction": [b"pick coke can"],
    }
    actions = {}
    for part, width in ACTION_PARTS.items():
        values = rng.normal(size=(len(frames), width)).astype(np.float32)
        if part == "terminate_episode":
            values = rng.integers(0, 2, (len(frames), width))
        actions[part] = values
        features[f"steps/action/{part}"] = values.reshape(-1).tolist()
    return record(example(features)), np.concatenate([actions[p].astype(np.float32) for p in sorted(actions)], axis=1)


def test_rt1_episodes(tmp_path):
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 256, (3 + i, 8, 10, 3)).astype(np.uint8) for i in range(3)]
    records, actions = zip(*(rt1_record(c, rng) for c in clips))
    path = tmp_path / "fractal-train.tfrecord-00000-of-00001"
    path.write_bytes(b"".join(records) + record(example({"other": [1]})))
    report = convert("rt1", path, tmp_path / "out")
    assert report.written == 3 and report.dropped == {"not a usable episode": 1}
    shards = ShardSet(tmp_path / "out")
    for i, clip in enumerate(clips):
        assert np.array_equal(episode_views(shards[i])["image"], clip)
        assert np.array_equal(shards[i]["actions.npy"], actions[i]) and shards[i]["actions.npy"].shape[1] == 13
        assert shards[i]["instruction.txt"] == "pick coke can"


# what tfds itself reads from the file, by make_tfds_episodes.py
TFDS = {
    "pick can 0": (4, "48f21d4f50f18e74efed436e9b8cc65a645f82f8776514e7f74b6bfd2b575920"),
    "pick can 1": (5, "07d22edf93a6cf1397a20ac5871a42fb3cb840f46160bbdb522c3ad48ac38290"),
    "pick can 2": (6, "3934c5028eca69f3eba5ca4375c10f54ef0cba15ebaa2464f8061583104470eb"),
}


def test_a_file_written_by_tfds(tmp_path):
    report = convert("rt1", Path(__file__).with_name("tfds_episodes.tfrecord"), tmp_path / "out")
    assert report.written == 3 and not report.dropped and not verify(tmp_path / "out").problems
    shards = ShardSet(tmp_path / "out")
    found = {}
    for i in range(3):
        sample = shards[i]
        assert sample["meta.json"]["shape"] == [24, 32, 3]
        frames = [sample[f] for f in sorted(sample) if f.startswith("frames.")]
        digest = hashlib.sha256(b"".join(frames) + sample["actions.npy"].tobytes())
        found[sample["instruction.txt"]] = (len(frames), digest.hexdigest())
    assert found == TFDS
    if importlib.util.find_spec("PIL"):
        assert episode_views(shards[0])["image"].shape == (4, 24, 32, 3)


def test_damaged_tfrecord(tmp_path):
    path = tmp_path / "x.tfrecord"
    whole = record(b"hello") + record(b"world")
    path.write_bytes(whole)
    assert [d for _, d in read_records(path)] == [b"hello", b"world"]
    first = len(record(b"hello"))
    assert [d for _, d in read_records(path, first)] == [b"world"]
    for change, reason in (
        (whole[:-3], "ends inside a record"),
        (whole[:14] + b"X" + whole[15:], "checksum of a record differs"),
        (b"X" + whole, "length"),
    ):
        path.write_bytes(change)
        with pytest.raises(ShardError, match=reason):
            list(read_records(path))
