"""From the cache's settings to what is done: a profile's defaults, and above them what was set by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..config import AUTO, CacheConfig
from ..units import GIB, MIB
from .precision import LatentPrecision, on_disk
from .schedule import PrecisionSchedule

_SCALES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"full": (1.0,), "full, 3/4": (1.0, 0.75), "full, 3/4, 1/2": (1.0, 0.75, 0.5)}
)


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """How a cache is built and read.

    Attributes:
        encoding: how latents are kept on disk.
        scales: the sizes that are encoded, in parts of the bucket; 1 is among them.
        ram_cache_bytes: what encodings may take in RAM while training; 0 keeps nothing there.
        predictive: whether the next batch is read from disk while a step runs.
        schedule: dynamic precision; None reads everything as it is on disk.
        uses_scores: whether samples keep their complexity scores.
        disk_limit_bytes: what the cache may take on disk; 0 is no limit.
    """

    encoding: LatentPrecision = "full"
    scales: tuple[float, ...] = (1.0,)
    ram_cache_bytes: int = 0
    predictive: bool = False
    schedule: PrecisionSchedule | None = None
    uses_scores: bool = True
    disk_limit_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Profile:
    ram_cache_mb: int = 1024
    compression: str = "none"
    scales: str = "full"
    predictive: bool = False
    dynamic_precision: bool = False
    full_above: float | None = None
    uses_scores: bool = True


_PROFILES: Mapping[str, _Profile] = MappingProxyType(
    {
        "balanced": _Profile(compression="moderate", predictive=True),
        "disk only": _Profile(ram_cache_mb=0),
        "aggressive": _Profile(ram_cache_mb=8192, scales="full, 3/4, 1/2", dynamic_precision=True, full_above=0.4),
        "minimal": _Profile(compression="moderate", uses_scores=False),
    }
)


def plan_of(config: CacheConfig) -> CachePlan:
    """Return what ``config`` comes to."""
    profile = _PROFILES[config.profile]
    # This profile's name is a promise, and older workflows say it beside the usual number of MiB.
    holds_nothing = config.profile == "disk only"
    ram_cache_mb = profile.ram_cache_mb if config.ram_cache_mb < 0 or holds_nothing else config.ram_cache_mb
    is_dynamic = _switch(config.dynamic_precision, profile.dynamic_precision)
    return CachePlan(
        encoding=on_disk(profile.compression if config.compression == AUTO else config.compression),
        scales=_SCALES[profile.scales if config.scales == AUTO else config.scales],
        ram_cache_bytes=ram_cache_mb * MIB,
        predictive=_switch(config.predictive, profile.predictive),
        schedule=_schedule(config, profile.full_above) if is_dynamic else None,
        uses_scores=profile.uses_scores,
        disk_limit_bytes=int(config.disk_limit_gb * GIB),
    )


def _switch(chosen: str, default: bool) -> bool:
    return default if chosen == AUTO else chosen == "on"


def _schedule(config: CacheConfig, full_above: float | None) -> PrecisionSchedule:
    """Return the schedule with the profile's limit and the thresholds that were set by hand; -1 leaves one as it is."""
    usual = PrecisionSchedule()
    middle, early = usual.middle_half_below, usual.early_half_below
    half = config.half_below
    bands = usual.middle_bands_below if full_above is None else full_above
    # What is set by hand wins, also over the profile's other threshold.
    bands = config.full_above if config.full_above >= 0 else max(bands, half)
    # Nothing above the limit of full precision is read at less, in no part of the run.
    return PrecisionSchedule(
        early_half_below=min(early if half < 0 else half, bands),
        middle_half_below=min(middle if half < 0 else half, bands),
        middle_bands_below=bands,
    )
