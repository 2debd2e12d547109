"""The fingerprint of CLIP: it stands for what captions are encoded with, in any process."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness.checkpoint import cached_sd15


def test_it_leaves_out_the_weight_that_the_host_leaves_unset(pack: Any) -> None:
    """SD1.5 checkpoints hold no text projection. The host makes one, never sets its numbers and never uses it."""
    import comfy.sd

    with torch.inference_mode():
        path = str(cached_sd15())
        _, clip, *_ = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, output_model=False)
        text_model = clip.cond_stage_model.clip_l.transformer
        digests = []
        for number in (1.0, 2.0):  # whatever memory held before
            text_model.text_projection.weight.fill_(number)
            digests.append(pack.nodes._encoders.HostClip(clip).fingerprint)
        text_model.text_model.final_layer_norm.weight.fill_(0.5)
        digests.append(pack.nodes._encoders.HostClip(clip).fingerprint)
    assert digests[0] == digests[1] != digests[2]
