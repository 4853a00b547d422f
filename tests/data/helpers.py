"""Functions that worker processes of the data tests import."""

from terrella.data.shards.writer import encode_sample


def square(i: int) -> list[tuple[str, bytes]]:
    return encode_sample({"n.json": i * i})
