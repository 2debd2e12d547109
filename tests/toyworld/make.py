"""Make the toy world's base model from nothing: ``python -m tests.toyworld.make``.

It needs the host's folder in ``LOWVRAM_HOST`` and takes about an hour of two cores or less. Stopped, it goes on where
it was when called again. The files go to ``tests/toyworld/base``, with what they score and how the losses fell.

The files that are shipped were made while this was written: the picture encoder's first stage drew its scenes by an
earlier version, so that a run from nothing gives a base like them and not the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.harness.places import CACHE, host_folder

from . import base, curve, exam, model, studio, vae
from .states import OtherRecipeError, Run

WORK = CACHE / "toyworld"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.toyworld.make", description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="where the unfinished training is kept")
    parser.add_argument("--into", type=Path, default=base.FOLDER, help="where the files go")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train what is not trained yet, write the files and print the scores."""
    options = parse(arguments)
    sys.path.insert(0, str(host_folder()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    options.into.mkdir(parents=True, exist_ok=True)
    coder = vae.train(options.work)
    vae.export(coder, options.into / base.VAE)
    average = model.train(options.work, coder)
    model.export(average, options.into / base.MODEL)
    about = describe(options.work, options.into)
    text = json.dumps(about, indent=2) + "\n"
    (options.into / "about.json").write_text(text, encoding="utf-8")
    print(text)
    return 0


def describe(work: Path, into: Path) -> dict[str, Any]:
    """Draw the curves and return hashes, processor seconds, losses and scores of the files in ``into``."""
    runs = {"picture encoder": Run(work / vae.FILE), "image network": Run(work / model.FILE)}
    for run in runs.values():
        run.load()
    curves = {name: curve.smoothed(run.curve) for name, run in runs.items()}
    curve.write(into / "losses.png", curves)
    opened = studio.open_studio(files(into))
    return {
        "sha256": {name: hashlib.sha256((into / name).read_bytes()).hexdigest() for name in (base.MODEL, base.VAE)},
        "processor_seconds": {name: round(run.seconds) for name, run in runs.items()},
        "steps": {name: run.step for name, run in runs.items()},
        "last_loss": {name: round(smooth[-1][1], 4) for name, smooth in curves.items()},
        "scores": {
            name: {key: round(value, 3) for key, value in asdict(exam.marked(opened, asked)).items()}
            for name, asked in exam.papers().items()
        },
    }


def files(folder: Path) -> dict[str, Path]:
    """Return the base's files by the host's folder type, with those in ``folder`` in place of the shipped ones."""
    return base.files() | {"diffusion_models": folder / base.MODEL, "vae": folder / base.VAE}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OtherRecipeError as error:
        sys.exit(str(error))
