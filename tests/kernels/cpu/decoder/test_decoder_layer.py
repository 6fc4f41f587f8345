from __future__ import annotations

from graftlm.kernels.cpu.decoder.decoder_layer import padded


def test_few_different_numbers_of_rows_are_computed_and_few_rows_too_many() -> None:
    assert [padded(n) for n in (1, 17, 64, 129, 200, 257, 1000)] == [8, 24, 64, 136, 200, 272, 1024]
    numbers = {padded(n) for n in range(1, 2049)}
    assert len(numbers) == 8 + 8 + 16 * 4
    assert all(n <= padded(n) <= max(n + 7, 17 / 16 * n) for n in range(1, 2049))
