"""The host's MODEL as the core's port; its VAE and CLIP are in ``_encoders``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.ops
import comfy.patcher_extension
import comfy.sampler_helpers
import comfy.samplers
import comfy.sd
import comfy.utils
import torch
from torch import Tensor, nn

from ..lowvram_lora.config import AttentionLimit
from ..lowvram_lora.data.encodings import unpack
from ..lowvram_lora.memory.local_attention import Attend
from ..lowvram_lora.ports import Encoding
from ._attention import adapted, attended, hides_padding, in_hosts_shape
from ._conditioning import ROWS, TEXT, grouped, stacked
from ._digest import describe, digest, is_quantised, patcher_digest, quantised_digest
from ._host import load_model
from ._kernels import kernel_problems
from ._text import without_padding
from ._weights import LayerWeights, unreadable


class HostWeights(LayerWeights):
    """The host's own way to a layer's weight: cast, dequantised and patched for one use."""

    def __init__(self) -> None:
        check = comfy.model_management.throw_exception_if_processing_interrupted
        super().__init__(cast=comfy.ops.cast_bias_weight, check=check)


# What runs around the network while sampling and has no counterpart in training.
_SAMPLING_WRAPPERS = (
    "outer_sample",
    "prepare_sampling",
    "sampler_sample",
    "predict_noise",
    "calc_cond_batch",
)
_SAMPLING_OPTIONS = (
    "sampler_cfg_function",
    "sampler_post_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_calc_cond_batch_function",
    "denoise_mask_function",
)


class HostDenoiser:
    """The host's MODEL as the core's ``Denoiser``.

    Weight patches and object patches on it are part of the base; wrappers of the network and attention patches run
    in training as they do in sampling; what can't be honoured is named by ``problems``.
    """

    def __init__(self, model: Any) -> None:
        self._patcher = model
        self._is_loaded = False
        self._room: int | None = None
        self._attention: Callable[..., Any] = _differentiable_attention
        self._attend: Attend = _attend
        self.weights = HostWeights()
        self.device: torch.device = model.load_device

    @property
    def network(self) -> nn.Module:
        """The diffusion network; keys of LoRA files count from here."""
        return self._patcher.model.diffusion_model  # type: ignore[no-any-return]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights and of all that acts on them; the host's own patch ids are random."""
        patcher = self._patcher
        acting = [patcher.object_patches, patcher.wrappers, patcher.model_options]
        weights = quantised_digest(patcher) if is_quantised(patcher.model) else patcher_digest(patcher)
        return digest([weights, describe(acting), self.base_name, self.prediction])

    @cached_property
    def _config_name(self) -> str:
        return type(self._patcher.model.model_config).__name__

    @property
    def base_name(self) -> str:
        """The base in kohya's words where kohya has one."""
        known = {"SD20": "sd_v2", "SDXL": "sdxl_base_v1-0", "SD3": "sd3", "Flux": "flux1", "SD15": "sd_v1"}
        return known.get(self._config_name, self._config_name.lower())

    @property
    def sigmas(self) -> Tensor:
        """The noise levels of the schedule on the MODEL, which a ModelSampling node may have replaced."""
        return self._sampling.sigmas  # type: ignore[no-any-return]

    @property
    def _sampling(self) -> Any:
        return self._patcher.get_model_object("model_sampling")

    @property
    def prediction(self) -> str:
        """What the network predicts."""
        if isinstance(self._sampling, comfy.model_sampling.V_PREDICTION):
            return "v"
        return "epsilon" if isinstance(self._sampling, comfy.model_sampling.EPS) else "flow"

    @cached_property
    def _diffusers_names(self) -> dict[str, str]:
        """Module path to flattened diffusers name, for the families whose files kohya names that way."""
        model = self._patcher.model
        if isinstance(model, comfy.model_base.SDXL | comfy.model_base.SDXLRefiner):
            return {}
        table = comfy.utils.unet_to_diffusers(model.model_config.unet_config)
        weights = ((ours, theirs) for theirs, ours in table.items() if theirs.endswith(".weight"))
        return {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in weights}

    def file_name(self, path: str) -> str:
        """Return the flattened kohya name of a layer."""
        return f"lora_unet_{self._diffusers_names.get(path, path).replace('.', '_')}"

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether the device computes in ``dtype``."""
        if self.device.type == "cpu" or dtype is not torch.bfloat16:
            return True
        return comfy.model_management.should_use_bf16(self.device)  # type: ignore[no-any-return]

    def prefers(self, dtype: torch.dtype) -> bool:
        """Return whether the host would choose ``dtype`` on this device."""
        if dtype is torch.bfloat16:
            return comfy.model_management.should_use_bf16(self.device)  # type: ignore[no-any-return]
        return comfy.model_management.should_use_fp16(self.device)  # type: ignore[no-any-return]

    def problems(self, latent_shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Return what can't be honoured, and what does not fit the latents."""
        return [
            *self._shape_problems(latent_shapes),
            *self._schedule_problems(),
            *self._patch_problems(),
            *self._weight_problems(),
            *kernel_problems(self.network),
        ]

    def _shape_problems(self, latent_shapes: Sequence[tuple[int, ...]]) -> list[str]:
        wanted = self._patcher.model.latent_format
        channels = sorted({shape[0] for shape in latent_shapes})
        if channels and channels != [wanted.latent_channels]:
            return [
                f"The VAE makes latents of {channels[0]} channels, but this MODEL works on {wanted.latent_channels}. "
                "Connect the VAE of the model's own family to Build Tiered Cache."
            ]
        dimensions = sorted({len(shape) - 1 for shape in latent_shapes})
        if dimensions and dimensions != [wanted.latent_dimensions]:
            return [
                f"The VAE makes latents of {dimensions[0]} dimensions, but this MODEL works on "
                f"{wanted.latent_dimensions}. Connect the VAE of the model's own family to Build Tiered Cache."
            ]
        return []

    def _schedule_problems(self) -> list[str]:
        sampling = self._sampling
        sampling_name = f"{type(sampling).__mro__[1].__name__}, {type(sampling).__mro__[-4].__name__}"
        unknown = isinstance(sampling, comfy.model_sampling.X0 | comfy.model_sampling.COSMOS_RFLOW)
        known = isinstance(sampling, comfy.model_sampling.EPS | comfy.model_sampling.CONST)
        if unknown or not known:
            return [f"The model's noise schedule ({sampling_name}) is not one that training knows the loss of."]
        if not hasattr(sampling, "sigmas"):
            return [f"The model's noise schedule ({sampling_name}) has no table of sigmas to draw from."]
        return []

    def _patch_problems(self) -> list[str]:
        patcher = self._patcher
        remedy = "Take it off the MODEL that goes into LoRA Train (low-VRAM)."
        found = [f"a sampling wrapper ({key})" for key in self._wrapper_keys(_SAMPLING_WRAPPERS)]
        found += [f"an injection ({key}), such as a bypass LoRA" for key in patcher.injections]
        if "model_function_wrapper" in patcher.model_options:
            found.append("a model function wrapper")
        if patcher.hook_patches or patcher.forced_hooks:
            found.append("scheduled weight hooks")
        found += [f"an additional model ({key}), such as a ControlNet" for key in patcher.additional_models]
        return [f"The MODEL carries {what}, which training can't honour. {remedy}" for what in found]

    def _weight_problems(self) -> list[str]:
        found = unreadable(self.network)
        if not found:
            return []
        path, reason = next(iter(found.items()))
        return [
            f"{len(found)} layers of the MODEL hold weights that training can't read (the first is {path}: {reason}). "
            "Load this model from another file: fp16, bf16, fp8 or GGUF."
        ]

    def _wrapper_keys(self, kinds: Iterable[str]) -> list[str]:
        return [str(key) for kind in kinds for key, held in self._patcher.wrappers.get(kind, {}).items() if held]

    def notes(self) -> list[str]:
        """Return which options on the MODEL only act in sampling."""
        present = [name for name in _SAMPLING_OPTIONS if self._patcher.model_options.get(name)]
        return [f"{', '.join(present)} on the MODEL only act when sampling; training does without."] if present else []

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Return VAE latents at the model's scale."""
        return self._patcher.model.process_latent_in(latents)  # type: ignore[no-any-return]

    def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
        """Return the noised latents by the host's own rule."""
        return self._sampling.noise_scaling(sigma_B, noise, latents)  # type: ignore[no-any-return]

    def loss_weight(self, sigma_B: Tensor) -> Tensor:
        """Return ``1 / sigma ** 2``, or v-prediction's weight."""
        if isinstance(self._sampling, comfy.model_sampling.V_PREDICTION):
            sd = self._sampling.sigma_data
            return (sigma_B**2 + sd**2) / (sigma_B * sd) ** 2
        return 1.0 / sigma_B**2

    def condition(
        self, encodings: Sequence[Encoding], noise: Tensor, cuts_padding: bool = False
    ) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the network's arguments: the host processes each caption by itself, then they are stacked."""
        singles = [self._process(each, noise[i : i + 1], cuts_padding) for i, each in enumerate(encodings)]

        def may_pad(num_text: int) -> bool:
            return hides_padding(self._patcher) and attended(self.network, noise, num_text).can_hide

        return [(group, stacked([singles[i] for i in group])) for group in grouped(singles, may_pad)]

    def _process(self, encoding: Encoding, noise: Tensor, cuts_padding: bool) -> dict[str, Any]:
        is_masked = isinstance(self._patcher.model, comfy.model_base.LTXV)
        conds = comfy.sampler_helpers.convert_cond(without_padding(unpack(encoding), is_masked, cuts_padding))
        processed = comfy.samplers.process_conds(self._patcher.model, noise, {"positive": conds}, self.device, seed=0)
        model_conds = processed["positive"][0]["model_conds"]
        return {key: cond.process_cond(batch_size=1, area=None) for key, cond in model_conds.items()}

    def predict_x0(
        self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any], limit: AttentionLimit | None = None
    ) -> Tensor:
        """Return the host's x0 prediction, through everything on the MODEL that acts inside the network."""
        given = dict(conditioning)
        rows, attention = given.pop(ROWS, None), self._attention
        if limit is not None or rows is not None:
            text = given.get(TEXT)
            sequence = attended(self.network, noised, None if text is None else text.shape[1], rows)
            attention = in_hosts_shape(adapted(self._attend, sequence, limit))
        options = self._transformer_options(sigma_B, attention)
        return self._patcher.model.apply_model(  # type: ignore[no-any-return]
            noised, sigma_B, transformer_options=options, **given
        )

    def _transformer_options(self, sigma_B: Tensor, attention: Callable[..., Any]) -> dict[str, Any]:
        model_options = comfy.model_patcher.create_model_options_clone(self._patcher.model_options)
        options: dict[str, Any] = model_options["transformer_options"]
        merge = comfy.patcher_extension.merge_nested_dicts
        options["wrappers"] = merge(options.get("wrappers", {}), self._patcher.wrappers)
        comfy.patcher_extension.add_wrapper_with_key("diffusion_model", "lowvram_lora", _without_prefetch, options)
        options["cond_or_uncond"] = [0] * len(sigma_B)
        options["sigmas"] = sigma_B
        options["optimized_attention_override"] = attention
        return options

    def load(self, room: int | None = None) -> None:
        """Bring the MODEL, with its patches, to where it computes, by the host's own means.

        Another MODEL on the same weights may have been there before, with other parts in the network.

        Args:
            room: device bytes that training will take. The weights stay in RAM then, and other models leave the
                device. None leaves it to the host where the weights are.
        """
        load_model(self._patcher, room)
        self._is_loaded, self._room = True, room

    @contextmanager
    def training(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in ``dtype`` until the context ends; load the MODEL as before if anything came between."""
        if not self._is_loaded:
            self.load(self._room)
        try:
            self._patcher.pre_run()
            with self._computing(dtype):
                yield
        finally:
            self._is_loaded = False
            self._patcher.cleanup()
            comfy.model_management.soft_empty_cache()

    @contextmanager
    def simulating(self, dtype: torch.dtype, attention: Callable[..., Tensor]) -> Iterator[None]:
        """Let ``predict_x0`` run on tensors without data; nothing is loaded, moved or read."""
        sampling = self._patcher.model.model_sampling
        before, had_timestep = (self._attention, self._attend), sampling.__dict__.get("timestep")
        try:
            self._attention, self._attend = in_hosts_shape(attention), attention
            # The host looks a sigma's place up in its table. The network only embeds what comes out.
            sampling.timestep = lambda sigma: sigma
            with self._computing(dtype):
                yield
        finally:
            self._attention, self._attend = before
            if had_timestep is None:
                sampling.__dict__.pop("timestep", None)
            else:
                sampling.timestep = had_timestep

    @contextmanager
    def _computing(self, dtype: torch.dtype) -> Iterator[None]:
        base, management = self._patcher.model, comfy.model_management
        had_training = getattr(management, "in_training", None)
        compute_dtype = base.manual_cast_dtype
        try:
            base.manual_cast_dtype = dtype
            if had_training is not None:
                management.in_training = True
            yield
        finally:
            if had_training is not None:
                management.in_training = had_training
            base.manual_cast_dtype = compute_dtype


def _differentiable_attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sage, flash and int8 attention have no gradient; torch's own always has."""
    return comfy.ldm.modules.attention.attention_pytorch(*args, **kwargs)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same over ``[B, heads, N, head_dim]``."""
    how = {"skip_reshape": True, "skip_output_reshape": True}
    return comfy.ldm.modules.attention.attention_pytorch(q, k, v, q.shape[1], mask=mask, **how)  # type: ignore[no-any-return]


def _without_prefetch(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers fetch their own weights; the host's block prefetch would fetch each a second time."""
    for options in (*args, *kwargs.values()):
        if isinstance(options, dict) and "cond_or_uncond" in options:
            options["prefetch_dynamic_vbars"] = False
    return executor(*args, **kwargs)


def with_lora(model: Any, lora: dict[str, Tensor]) -> Any:
    """Return a clone of MODEL with ``lora`` on it, through the host's own loader."""
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
