"""What of a caption lies beyond a text encoder's window, as the host's own tokenizers count."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.checkpoint import cached_sd15

SENTENCE = "a photograph of one red bicycle leaning on an old garden wall in the evening light "


class Endless:
    """Counts as the host's T5 does: one window for any caption."""

    max_length = 99999999

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> list[Any]:
        return [[(1, 1.0, 1)] * len(text.split())]


def clip_of(tokenizer: Any, **encoders: Any) -> Any:
    def tokenize(text: str, return_word_ids: bool = False, **kwargs: Any) -> Any:
        return tokenizer.tokenize_with_weights(text, return_word_ids, **kwargs)

    return SimpleNamespace(tokenizer=tokenizer, tokenize=tokenize, cond_stage_model=SimpleNamespace(**encoders))


def clip_l() -> Any:
    from comfy.sd1_clip import SD1Tokenizer

    return clip_of(SD1Tokenizer())


def clip_sdxl() -> Any:
    from comfy.sdxl_clip import SDXLTokenizer

    return clip_of(SDXLTokenizer())


@pytest.mark.parametrize("clip", [clip_l, clip_sdxl])
def test_what_is_beyond_the_window_is_what_the_host_puts_into_its_second_chunk(
    pack: Any, clip: Callable[[], Any]
) -> None:
    """b01"""
    host = clip()
    window = pack.nodes._text.window_of(host)
    caption = SENTENCE * 6 + "at the very end sks"
    num_tokens, rest = window.left_over(caption)
    chunks = host.tokenize(caption)["l"]
    assert window.num_tokens == 75 and window.is_chunked and window.is_exact and len(chunks) == 2
    assert num_tokens > 75 and rest.endswith("at the very end sks") and caption.endswith(rest)
    # The rest alone makes the tokens that the host has in its second chunk.
    assert host.tokenize(rest)["l"] == chunks[1:]


def test_a_caption_that_just_fits_leaves_nothing_and_one_word_more_leaves_that_word(pack: Any) -> None:
    window = pack.nodes._text.window_of(clip_l())
    assert window.left_over("cat " * 75) == (75, "")
    assert window.left_over("cat " * 75 + "dog") == (76, "dog")
    assert window.left_over("a cat")[1] == window.left_over("")[1] == ""


def test_weights_and_chinese_are_counted_as_the_host_counts_them(pack: Any) -> None:
    window = pack.nodes._text.window_of(clip_l())
    assert window.left_over("(cat:1.2) " * 75)[0] == 75  # brackets and numbers are no tokens
    num_tokens, rest = window.left_over("一只红色的猫坐在窗台上" * 8)
    assert num_tokens > 75 and rest and set(rest) <= set("一只红色的猫坐在窗台上 ")


def test_an_encoder_that_reads_any_length_has_no_window(pack: Any) -> None:
    class Alone:
        t5xxl = Endless()

        def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
            return {"t5xxl": self.t5xxl.tokenize_with_weights(text)}

    assert pack.nodes._text.window_of(clip_of(Alone())) is None


def test_beside_clip_an_encoder_that_reads_any_length_is_named(pack: Any) -> None:
    from comfy.sd1_clip import SDTokenizer

    class Both:
        clip_l = SDTokenizer()
        t5xxl = Endless()

        def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
            own = self.clip_l.tokenize_with_weights(text, return_word_ids)
            return {"l": own, "t5xxl": self.t5xxl.tokenize_with_weights(text)}

    window = pack.nodes._text.window_of(clip_of(Both()))
    assert window.num_tokens == 75 and window.unlimited == ("t5xxl",)
    assert window.left_over("cat " * 76) == (76, "cat")
    # The host tokenizes for it also where it is not loaded.
    assert pack.nodes._text.window_of(clip_of(Both(), t5xxl=None)).unlimited == ()


def test_the_hosts_summary_of_a_long_caption_is_that_of_its_first_window_and_its_rows_are_of_all(pack: Any) -> None:
    """b01: what the doctor says of captions in several parts."""
    import comfy.sd
    import torch

    with torch.inference_mode():
        _, clip, *_ = comfy.sd.load_checkpoint_guess_config(str(cached_sd15()), output_vae=False, output_model=False)
        window = pack.nodes._text.window_of(clip)
        first, second = "cat " * window.num_tokens, "dog on a red mat"
        rows, summary = clip.encode_from_tokens(clip.tokenize(first + second), return_pooled=True)
        rows_first, summary_first = clip.encode_from_tokens(clip.tokenize(first), return_pooled=True)
        other, _ = clip.encode_from_tokens(clip.tokenize(first + "a blue bird"), return_pooled=True)
    assert torch.equal(summary, summary_first)
    assert rows.shape[1] == 2 * rows_first.shape[1] and not torch.equal(rows, other)
