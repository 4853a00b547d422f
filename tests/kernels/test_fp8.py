"""Runs fp8_cases.py: under Triton's interpreter (conftest.py starts it), compiled on a GPU; and the reference against
the format's definition.
"""

import subprocess

import pytest
import torch

from terrella.kernels.fp8 import cast_columns, cast_rows, scaled_product
from terrella.tests.kernels.conftest import cases


def test_kernels_through_the_interpreter(outcome_of) -> None:
    done = outcome_of("test_fp8.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run([*cases("fp8_cases.py"), "-s"], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout)


def test_reference_keeps_what_the_format_can_hold() -> None:
    """Numbers of e4m3 whose rows reach 448 come back as they were; others within 2^-4; a row of zeros stays zero."""
    every = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()  # 0 .. 448
    x = torch.stack([every, -every * 2.0**-40, torch.zeros(127)])
    got = cast_rows(x)
    assert torch.equal(got.wide(), x) and torch.equal(got.scale_N[:2], torch.tensor([1.0, 2.0**-40]))
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    assert ((cast_rows(x).wide() - x).abs() <= (x.abs() / 16).clamp_min(x.abs().amax(1, keepdim=True) * 2.0**-18)).all()
    assert torch.equal(cast_columns(x).wide(), cast_rows(x.T).wide())


def test_reference_product_is_off_by_the_rounding_of_its_factors() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 512), torch.randn(96, 512)
    got = scaled_product(cast_rows(a), cast_rows(b), torch.float32)
    error = (got - a @ b.T).norm() / (a @ b.T).norm()
    assert 1e-2 <= error <= 2**0.5 * 2.0**-4 / 3**0.5
    torch.testing.assert_close(got, torch._scaled_mm(
        cast_rows(a).data_NK, cast_rows(b).data_NK.T, scale_a=cast_rows(a).scale_N[:, None],
        scale_b=cast_rows(b).scale_N[None], out_dtype=torch.float32,
    ))  # fmt: skip
