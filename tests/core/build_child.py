"""A process that builds a cache: ``python build_child.py <folder> <log> <seconds an image> [<largest file in bytes>]``.

Every picture it encodes is a line of the log, written before the encoding.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lowvram_lora.config import DataConfig
from lowvram_lora.data.cache import build
from lowvram_lora.data.scan import scan
from lowvram_lora.errors import LowVramLoraError
from lowvram_lora.fakes import FakeCodec, FakeTextEncoder
from lowvram_lora.ports import EncodedPictures


@dataclass(frozen=True)
class SlowCodec(FakeCodec):
    log: Path = Path()
    seconds: float = 0.0

    def encode(self, pixels_BHWC: Tensor) -> EncodedPictures:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{float(pixels_BHWC.mean()):.9f}\n")
        time.sleep(self.seconds)
        return super().encode(pixels_BHWC)


def main(folder: str, log: str, seconds: str, largest: str = "") -> None:
    root = Path(folder)
    dataset = scan(DataConfig(folder="set", resolution=64), [root])
    if largest:
        import resource

        # Writing beyond it fails as on a full disk: some bytes are written, then comes an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), resource.RLIM_INFINITY))
    codec = SlowCodec(log=Path(log), seconds=float(seconds))
    try:
        build(dataset, codec, FakeTextEncoder(), root / "cache", lambda *_: None)
    except LowVramLoraError as error:
        print(error, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
