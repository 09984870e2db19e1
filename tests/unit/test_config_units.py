from __future__ import annotations

import pytest

from swapper.config.units import duration_ms, show_mib, size_bytes, size_mib


@pytest.mark.parametrize(
    ("text", "mib"),
    [("24GiB", 24_576), ("19.5GiB", 19_968), ("512 MiB", 512), ("1TiB", 1_048_576), (0, 0), (1_048_577, 2)],
)
def test_a_size_is_read_as_mib_rounded_up(text: object, mib: int) -> None:
    assert size_mib(text) == mib


def test_a_size_may_be_read_as_bytes() -> None:
    assert [size_bytes(text) for text in ("64MiB", "1KiB", "512", 7)] == [67_108_864, 1024, 512, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24GB", "did you mean 24GiB?"),
        ("24g", "did you mean 24GiB?"),
        (24, "did you mean 24GiB?"),
        ("1 parsec", "units are KiB, MiB and GiB"),
        ("much", "write it like 24GiB"),
        ("\u0663GiB", "is not a size; write it like 24GiB"),
        ("\u0663", "is not a size; write it like 24GiB"),
        (True, "write it like 24GiB"),
        (None, "write it like 24GiB"),
        (-1, "write it like 24GiB"),
        ("9" * 300 + "GiB", "9999...999999GiB' is more than any card or disk has"),
        ("9" * 400 + "GiB", "more than any card or disk has"),
        (10**400, "more than any card or disk has"),
        ("2000000TiB", "more than any card or disk has"),
    ],
)
def test_a_wrong_size_says_what_to_write(text: object, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        size_mib(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("30s", 30_000), ("10m", 600_000), ("2h", 7_200_000), ("1h30m", 5_400_000), ("250ms", 250), ("1d", 86_400_000)],
)
def test_a_duration_is_read_as_ms(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


def test_no_time_at_all_needs_no_unit() -> None:
    assert duration_ms(0) == duration_ms("0") == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (30, "write 30s"),
        ("30", "write 30s"),
        ("soon", "like 30s, 10m or 2h"),
        ("\u0663s", "like 30s, 10m or 2h"),
        (True, "like 30s"),
        ("", "like 30s"),
        ("9" * 400 + "d", "longer than 1000 years"),
        ("366000d", "longer than 1000 years"),
    ],
)
def test_a_wrong_duration_says_what_to_write(text: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        duration_ms(text)


def test_sizes_are_shown_as_people_write_them() -> None:
    assert [show_mib(19_968), show_mib(512)] == ["19.5 GiB", "512 MiB"]
