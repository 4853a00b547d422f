"""Functions that worker processes of the data tests import."""


def square(i: int) -> dict:
    return {"n.json": i * i}
