"""Where the checkout, the host and the harness's files are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"


def host_folder() -> Path:
    """Return the folder of the ComfyUI to use; ``dev.py`` names it in the environment."""
    folder = Path(os.environ.get("LOWVRAM_HOST") or CACHE / "host")
    if not (folder / "main.py").is_file():
        raise FileNotFoundError(f"There is no ComfyUI in {folder}. `python3 dev.py test` fetches one.")
    return folder
