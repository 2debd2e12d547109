"""The toy world's text encoder: a CLIP-L from a seed that is a look-up table.

Token and position tables are random; every layer but the last is the identity; the last adds the mean over the words
so far and feeds the pooled vector alone. The host loads and runs it as any CLIP-L, and its output has a closed form
(``Table.encode``), so that captions cost a training nothing. 240 MB of which nothing but the seed has to be shipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

SEED = 64
VOCABULARY, POSITIONS, WIDTH, LAYERS = 49408, 77, 768, 12
START, END = 49406, 49407


def table(rows: int, stream: int) -> torch.Tensor:
    """Return ``rows`` vectors of random numbers with deviation 0.7: float16, ``[rows, 768]``.

    Made of the raw bits of PCG64, which no version of numpy changes.
    """
    raw = np.random.PCG64([SEED, stream]).random_raw(rows * WIDTH // 8)
    signed = raw.view(np.uint8).astype(np.float32) - 127.5
    return torch.from_numpy(signed.reshape(rows, WIDTH) * (0.7 / 73.9)).half()


class Table:
    """What the host makes of captions, in closed form."""

    def __init__(self) -> None:
        self.tokens, self.positions = table(VOCABULARY, 0).float(), table(POSITIONS, 1).float()

    def encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return context, ``[N, 77, 768]``, and pooled vector, ``[N, 768]``, of token ids, ``[N, 77]``."""
        context = self.tokens[ids] + self.positions
        ends = (ids == END).float().argmax(-1)
        upto = (torch.arange(POSITIONS) <= ends[:, None]).float()
        normal = torch.nn.functional.layer_norm(context, (WIDTH,))
        average = (normal * upto[..., None]).sum(1) / upto.sum(1, keepdim=True)
        last = context[torch.arange(len(ids)), ends] + average
        return context, torch.nn.functional.layer_norm(last, (WIDTH,))


class Tokens:
    """Captions to token ids, as the host's tokenizer has them; each word is asked for once."""

    def __init__(self) -> None:
        from comfy.sd1_clip import SDTokenizer

        self._tokenizer = SDTokenizer()
        self._known: dict[str, list[int]] = {}

    def ids(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the ids of captions in plain words: int64, ``[N, 77]``."""
        rows = []
        for caption in captions:
            row = [START, *(number for word in caption.split() for number in self._word(word))]
            rows.append(row + [END] * (POSITIONS - len(row)))
        return torch.tensor(rows)

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            pairs = self._tokenizer.tokenize_with_weights(word)[0]
            self._known[word] = [int(number) for number, _ in pairs if number not in (START, END)]
        return self._known[word]


def write(file: Path) -> Path:
    """Write the text encoder as the host's CLIPLoader takes it, unless it is there; return the file."""
    if file.is_file():
        return file
    state = {
        "text_model.embeddings.token_embedding.weight": table(VOCABULARY, 0),
        "text_model.embeddings.position_embedding.weight": table(POSITIONS, 1),
        "text_model.final_layer_norm.weight": torch.ones(WIDTH).half(),
        "text_model.final_layer_norm.bias": torch.zeros(WIDTH).half(),
        "text_projection.weight": torch.eye(WIDTH).half(),
    }
    for number in range(LAYERS):
        state |= {f"text_model.encoder.layers.{number}.{name}": tensor for name, tensor in _layer(number).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    save_file(state, partial)
    os.replace(partial, file)
    return file


def _layer(number: int) -> dict[str, torch.Tensor]:
    """A layer that adds nothing; the last one adds the mean of the normalised words up to each position."""
    matrices = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    matrices |= {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
    state = {f"{name}.weight": torch.zeros(shape).half() for name, shape in matrices.items()}
    state |= {f"{name}.bias": torch.zeros(shape[0]).half() for name, shape in matrices.items()}
    for norm in ("layer_norm1", "layer_norm2"):
        state |= {f"{norm}.weight": torch.ones(WIDTH).half(), f"{norm}.bias": torch.zeros(WIDTH).half()}
    if number == LAYERS - 1:
        state["self_attn.v_proj.weight"] = torch.eye(WIDTH).half()
        state["self_attn.out_proj.weight"] = torch.eye(WIDTH).half()
    return state
