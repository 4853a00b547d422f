"""Counter-based randomness: the tensor form equals the scalar one, and numbers look uniform."""

import torch

from terrella.core.rng import fold, key_tensor, permutation, uniform, uniform_tensor


def test_tensor_and_scalar_forms_agree_bit_for_bit() -> None:
    keys = [(seed, prompt, sample) for seed in (0, 7, -3, 2**40) for prompt in range(5) for sample in range(3)]
    counters = torch.arange(len(keys)) * 31
    tensor = uniform_tensor(key_tensor(keys), counters)
    assert tensor.tolist() == [uniform(*key, int(c)) for key, c in zip(keys, counters, strict=True)]


def test_numbers_are_uniform_and_keys_matter() -> None:
    values = uniform_tensor(key_tensor([(1, 2)]).expand(100_000), torch.arange(100_000))
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(values.min()) >= 0 and float(values.max()) < 1
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 45.3  # chi-squared, 19 degrees, p = 0.0006
    assert fold(1, 2) != fold(2, 1)


def test_permutation_is_one_and_reproducible() -> None:
    assert sorted(permutation(100, 5)) == list(range(100))
    assert permutation(100, 5) == permutation(100, 5) != permutation(100, 6)
