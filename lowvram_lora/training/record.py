"""Finished runs on disk, by the fingerprint of everything that determines them.

So queueing an unchanged graph trains nothing, even after the host has dropped its own cache or was restarted.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..adapters import file
from ..errors import PathError
from ..events import MemoryRecord, Record

FORMAT = 1
_LATEST = "latest_memory.json"


@dataclass(frozen=True)
class RunStore:
    """The folder of finished runs."""

    root: Path

    def save(self, record: Record) -> None:
        """Write ``record``; its JSON comes last and is what makes it count as finished."""
        file.write(self._weights(record.fingerprint), record.lora, record.metadata)
        plain = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in ("lora", "memory")}
        self._write_json(f"{record.fingerprint}.json", {**plain, "format": FORMAT, "memory": asdict(record.memory)})

    def find(self, fingerprint: str) -> Record | None:
        """Return the finished run of ``fingerprint``, or None if there is none that can be read whole."""
        values = self._read_json(f"{fingerprint}.json")
        if values is not None and _is_digest(values.get("same_as")):
            fingerprint = values["same_as"]
            values = self._read_json(f"{fingerprint}.json")
        if values is None or values.pop("format", None) != FORMAT:
            return None
        try:
            lora, metadata = file.read(self._weights(fingerprint))
            values.update(losses=tuple(values["losses"]), memory=_memory(values["memory"]))
            values.update(validation=tuple((done, loss) for done, loss in values.get("validation", ())))
            record = Record(**values, lora=lora)
        except (PathError, TypeError, KeyError, ValueError):
            return None
        is_this = record.fingerprint == metadata.get(file.FINGERPRINT_KEY) == fingerprint
        return record if is_this and _is_sound(record) else None

    def remember(self, asked: str, fingerprint: str) -> None:
        """Let ``find`` answer ``asked`` with the finished run of ``fingerprint``.

        Raises:
            PathError: the disk does not take it.
        """
        self._write_json(f"{asked}.json", {"format": FORMAT, "same_as": fingerprint})

    def save_memory(self, memory: MemoryRecord) -> None:
        """Keep ``memory`` as the latest run's, finished or not."""
        self._write_json(_LATEST, asdict(memory))

    def latest_memory(self) -> MemoryRecord | None:
        """Return the memory record of the run that ended last."""
        values = self._read_json(_LATEST)
        try:
            return None if values is None else _memory(values)
        except (TypeError, KeyError):
            return None

    def _weights(self, fingerprint: str) -> Path:
        return self.root / f"{fingerprint}.safetensors"

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        path = self.root / name
        temporary = path.with_name(f"{name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise PathError(path, f"can't be written ({error.strerror}). Free some space.") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            values = json.loads((self.root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return values if isinstance(values, dict) else None


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _is_sound(record: Record) -> bool:
    """Return whether every value has its type: anybody may have edited the file."""
    sizes = (record.seconds, record.steps, record.num_layers, record.num_parameters)
    numbers = (*record.losses, *(number for pair in record.validation for number in pair), *sizes)
    texts = (record.precision, record.held_out, *record.metadata, *record.metadata.values())
    are_numbers = all(isinstance(value, int | float) for value in numbers)
    return are_numbers and all(isinstance(text, str) for text in texts) and record.steps == len(record.losses) > 0


def _memory(values: dict[str, Any]) -> MemoryRecord:
    """Return the record in ``values``. Raises ``TypeError`` or ``KeyError`` if it is not one."""
    memory = MemoryRecord(**{**values, "history": tuple(values["history"])})
    for counts in (memory.peak, memory.average, *memory.history, *memory.phases.values()):
        if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
            raise TypeError("counts are no dict of integers")
    if memory.peak.keys() != memory.average.keys() or not isinstance(memory.steps, int):
        raise TypeError("counts do not match")
    return memory
