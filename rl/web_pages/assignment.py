"""Minimum-cost assignment (the Hungarian method by shortest augmenting paths), in numpy. Shapes: R rows, C columns,
R <= C.
"""

from __future__ import annotations

import numpy as np


def assign(cost_RC: np.ndarray) -> list[int]:
    """For each row the column it gets, all different, with the smallest total cost. There must be at least as many
    columns as rows.
    """
    rows, columns = cost_RC.shape
    if rows > columns:
        raise ValueError(f"{rows} rows cannot each have one of {columns} columns; give the transpose")
    if not np.isfinite(cost_RC).all():
        raise ValueError("a cost is not finite")
    u_R, v_C = np.zeros(rows), np.zeros(columns)
    row_of_C = np.full(columns, -1)
    for row in range(rows):
        _augment(cost_RC, row, u_R, v_C, row_of_C)
    result = [-1] * rows
    for column, row in enumerate(row_of_C.tolist()):
        if row >= 0:
            result[row] = column
    return result


def _augment(cost_RC: np.ndarray, start: int, u_R: np.ndarray, v_C: np.ndarray, row_of_C: np.ndarray) -> None:
    """Give the row a column, moving others along the cheapest alternating path; the duals stay feasible."""
    columns = len(v_C)
    distance_C = np.full(columns, np.inf)
    before_C = np.full(columns, -1)  # the column from whose row this one was reached; -1 is the start row
    done_C = np.zeros(columns, bool)
    visited: list[tuple[int, float]] = [(start, 0.0)]
    row, last, reached = start, -1, 0.0
    while True:
        through_C = reached + cost_RC[row] - u_R[row] - v_C
        better_C = ~done_C & (through_C < distance_C)
        distance_C[better_C], before_C[better_C] = through_C[better_C], last
        last = int(np.where(done_C, np.inf, distance_C).argmin())
        reached = float(distance_C[last])
        done_C[last] = True
        if row_of_C[last] < 0:
            break
        row = int(row_of_C[last])
        visited.append((row, reached))
    for r, at in visited:
        u_R[r] += reached - at
    v_C[done_C] += distance_C[done_C] - reached
    while last >= 0:
        previous = int(before_C[last])
        row_of_C[last] = row_of_C[previous] if previous >= 0 else start
        last = previous
