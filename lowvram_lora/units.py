"""Numbers, bytes and durations in words."""

MIB = 1 << 20
GIB = 1 << 30


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` in the largest binary unit that keeps it at 1 or more, e.g. ``1.5 GiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as ``1h02m``, ``3m05s`` or ``4.2s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.1f}s"


def counted(number: int, one: str, many: str = "") -> str:
    """Return ``number`` with its noun: ``1 image``, ``2 images``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
