"""Format figures for people, in the same way in the terminal and in the report."""

MISSING = "–"


def megabytes(value: float | None) -> str:
    """Bytes as kB, MB or GB, decimal."""
    if value is None:
        return MISSING
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    if value is None:
        return MISSING
    return f"{value * 1e3:,.0f} ms" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def percent(value: float | None) -> str:
    """A share of one as a percentage, without a minus zero."""
    return MISSING if value is None else f"{value * 100 + 0.0:.1f} %".replace("-0.0 %", "0.0 %")
