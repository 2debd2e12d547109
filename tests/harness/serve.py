"""Runs ComfyUI with the pack loaded, for a person at a browser. Its data stay under ``.cache/user-host``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.harness.host import device_flags, host_command, install_pack, prepare_base
from tests.harness.places import CACHE

PORT = 8188


def main(flags: Sequence[str]) -> int:
    """Run ComfyUI until it is stopped; ``flags`` go to its ``main.py`` and win over ours."""
    base = CACHE / "user-host"
    prepare_base(base)
    install_pack(base, "lowvram-lora")
    command = host_command(base, PORT, [*device_flags(), *flags], {})
    port = flags[flags.index("--port") + 1] if "--port" in flags else PORT
    print(f"ComfyUI: http://127.0.0.1:{port}   (Ctrl+C ends it)")
    print(f"Checkpoints go to {base / 'models' / 'checkpoints'}, pictures to {base / 'input'}.", flush=True)
    if os.name == "posix":
        # In this process's place, so that what stops this process stops ComfyUI.
        os.chdir(base)
        os.execv(command[0], command)
    return subprocess.run(command, cwd=base, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
