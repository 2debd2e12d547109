from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from lowvram_lora.data.encodings import pack, unpack
from lowvram_lora.errors import UnsupportedModelError
from lowvram_lora.ports import Encoding


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def conditioning() -> list[Any]:
    return [
        [
            torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(0)),
            {
                "pooled_output": torch.tensor([[float("nan"), -0.0, float("inf")]], dtype=torch.bfloat16),
                "attention_mask": torch.tensor([[1, 0]]),
                "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
                "guidance": 3.5,
                "num": 4,
                "flag": True,
                "nothing": None,
                "text": "一只猫",
                "nested": {"list": [1, (2, torch.tensor(3.0))], "empty": {}, "tuple": ()},
                7: "a number as key",
            },
        ],
        [torch.zeros(1, 0, 5), {}],
    ]


def test_round_trip_keeps_every_bit_and_type() -> None:
    assert_same(unpack(pack(conditioning())), conditioning())


def test_round_trip_through_safetensors() -> None:
    packed = pack(conditioning())
    assert_same(unpack(Encoding(load(save(packed.tensors)), packed.structure)), conditioning())


def test_tensors_are_own_contiguous_copies() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    packed = pack([[base.T, {"same": base}]])
    base.zero_()
    first, second = unpack(packed)[0][0], unpack(packed)[0][1]["same"]
    assert first.is_contiguous()
    assert torch.equal(first, second.T)
    assert second.sum() == 66


def test_inference_tensors_are_accepted() -> None:
    with torch.inference_mode():
        packed = pack([[torch.ones(2), {}]])
    assert unpack(packed)[0][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.eye(2).to_sparse()])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedModelError, match="hooks") as caught:
        pack([[torch.ones(1), {"hooks": value}]])
    assert type(value).__name__ in str(caught.value)


def test_a_key_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="key"):
        pack([[torch.ones(1), {("a", "b"): 1}]])
