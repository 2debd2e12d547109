"""The host's MODEL, CLIP and VAE as the core's ports."""

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

from ..lowvram_lora.data.encodings import pack, unpack
from ..lowvram_lora.memory.frozen import matrices
from ..lowvram_lora.memory.scratch import ScratchPool
from ..lowvram_lora.ports import Encoding, Weights
from ._digest import describe, digest, patcher_digest


class HostVae:
    """The host's VAE as the core's ``LatentCodec``."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self.fingerprint = patcher_digest(vae.patcher)

    def encode(self, pixels_HWC: Tensor) -> Tensor:
        """Return the unscaled latents of one picture, without the batch axis."""
        latents: Tensor = self._vae.encode(pixels_HWC.unsqueeze(0))
        return latents[0].float().cpu()


# SD 1.5 and SDXL checkpoints lack it; the host then leaves it as the memory was, and these families do not use it.
_NOT_LOADED = ("clip_l.transformer.text_projection.weight",)


class HostClip:
    """The host's CLIP as the core's ``TextEncoder``."""

    def __init__(self, clip: Any) -> None:
        self._clip = clip
        options = (clip.layer_idx, sorted(clip.tokenizer_options.items()))
        self.fingerprint = digest([patcher_digest(clip.patcher, _NOT_LOADED), repr(options)])

    def encode(self, caption: str) -> Encoding:
        """Return the conditioning the host's own CLIP Text Encode node gives for ``caption``."""
        return pack(self._clip.encode_from_tokens_scheduled(self._clip.tokenize(caption), show_pbar=False))


class HostWeights:
    """The host's own way to a layer's weight: cast, moved, dequantised and patched for one use."""

    def __init__(self) -> None:
        self._scratch = ScratchPool()

    @contextmanager
    def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
        """Yield the weights of ``module`` where and as ``like`` is. Raises the host's interrupt on Cancel."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not hasattr(module, "weight_function"):
            yield _plain_weights(module, like)
            return
        if _is_plain_cast(module, like):
            weight, buffer = self._scratch.lend(module.weight, like.dtype)
            try:
                yield Weights(weight, None if module.bias is None else module.bias.to(like.dtype), True)
            finally:
                self._scratch.take_back(buffer)
            return
        # The host casts in inference mode always; its patches write into tensors that were made there.
        with torch.inference_mode():
            weight, bias, stream = comfy.ops.cast_bias_weight(
                module, dtype=like.dtype, device=like.device, bias_dtype=like.dtype, offloadable=True
            )
        try:
            # On other devices a cast may sit in a buffer that the host reuses for the next layer.
            yield Weights(weight, bias, like.device.type == "cpu" or weight is module.weight)
        finally:
            comfy.ops.uncast_bias_weight(module, weight, bias, stream)


def _is_quantised(module: Any) -> bool:
    """Return whether a layer's weight means something only together with a scale or a layout."""
    has_scale = getattr(module, "scale_weight", None) is not None
    return has_scale or not (module.weight is None or type(module.weight) in (Tensor, nn.Parameter))


def _is_plain_cast(module: Any, like: Tensor) -> bool:
    """Return whether all the host would do is change the dtype, on the CPU, where new memory is slow to come by."""
    weight = module.weight
    return (
        like.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype != like.dtype
        and not (module.weight_function or module.bias_function)
    )


def _plain_weights(module: Any, like: Tensor) -> Weights:
    with torch.inference_mode():
        bias = module.bias.to(like) if getattr(module, "bias", None) is not None else None
        return Weights(module.weight.to(like), bias, True)


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
        return digest([patcher_digest(patcher), describe(acting), self.base_name, self.prediction])

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
        quantised = [path for path, module in matrices(self.network) if _is_quantised(module)]
        if not quantised:
            return []
        return [
            f"{len(quantised)} layers of the MODEL hold quantised weights (the first is {quantised[0]}), which this "
            "version can't train on. Load the fp16 or bf16 file of this model."
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

    def condition(self, encodings: Sequence[Encoding], noise: Tensor) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the network's arguments: the host processes each caption by itself, then they are stacked."""
        singles = [self._process(encoding, noise[i : i + 1]) for i, encoding in enumerate(encodings)]
        groups: list[list[int]] = []
        for i, conds in enumerate(singles):
            fitting = (group for group in groups if _can_stack(singles[group[0]], conds))
            group = next(fitting, None)
            if group is None:
                groups.append([i])
            else:
                group.append(i)
        return [(group, _stack([singles[i] for i in group])) for group in groups]

    def _process(self, encoding: Encoding, noise: Tensor) -> dict[str, Any]:
        conds = comfy.sampler_helpers.convert_cond(unpack(encoding))
        processed = comfy.samplers.process_conds(self._patcher.model, noise, {"positive": conds}, self.device, seed=0)
        model_conds = processed["positive"][0]["model_conds"]
        return {key: cond.process_cond(batch_size=1, area=None) for key, cond in model_conds.items()}

    def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any]) -> Tensor:
        """Return the host's x0 prediction, through everything on the MODEL that acts inside the network."""
        options = self._transformer_options(sigma_B)
        return self._patcher.model.apply_model(  # type: ignore[no-any-return]
            noised, sigma_B, transformer_options=options, **conditioning
        )

    def _transformer_options(self, sigma_B: Tensor) -> dict[str, Any]:
        model_options = comfy.model_patcher.create_model_options_clone(self._patcher.model_options)
        options: dict[str, Any] = model_options["transformer_options"]
        merge = comfy.patcher_extension.merge_nested_dicts
        options["wrappers"] = merge(options.get("wrappers", {}), self._patcher.wrappers)
        comfy.patcher_extension.add_wrapper_with_key("diffusion_model", "lowvram_lora", _without_prefetch, options)
        options["cond_or_uncond"] = [0] * len(sigma_B)
        options["sigmas"] = sigma_B
        options["optimized_attention_override"] = _differentiable_attention
        return options

    def load(self) -> None:
        """Bring the MODEL, with its patches, to where it computes, by the host's own means.

        Another MODEL on the same weights may have been there before, with other parts in the network.
        """
        with torch.inference_mode():
            comfy.model_management.load_models_gpu([self._patcher])

    @contextmanager
    def training(self, dtype: torch.dtype) -> Iterator[None]:
        """Load the MODEL and compute in ``dtype`` until the context ends."""
        base, management = self._patcher.model, comfy.model_management
        self.load()
        had_training = getattr(management, "in_training", None)
        compute_dtype = base.manual_cast_dtype
        try:
            self._patcher.pre_run()
            base.manual_cast_dtype = dtype
            if had_training is not None:
                management.in_training = True
            yield
        finally:
            if had_training is not None:
                management.in_training = had_training
            base.manual_cast_dtype = compute_dtype
            self._patcher.cleanup()
            management.soft_empty_cache()


def _differentiable_attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sage, flash and int8 attention have no gradient; torch's own always has."""
    return comfy.ldm.modules.attention.attention_pytorch(*args, **kwargs)


def _without_prefetch(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers fetch their own weights; the host's block prefetch would fetch each a second time."""
    for options in (*args, *kwargs.values()):
        if isinstance(options, dict) and "cond_or_uncond" in options:
            options["prefetch_dynamic_vbars"] = False
    return executor(*args, **kwargs)


def _can_stack(first: dict[str, Any], other: dict[str, Any]) -> bool:
    return first.keys() == other.keys() and all(first[key].can_concat(other[key]) for key in first)


def _stack(conds: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = conds
    return {key: _usable(cond.concat([other[key] for other in others])) for key, cond in first.items()}


def _usable(value: Any) -> Any:
    """Return ``value`` without inference tensors, which autograd refuses to save."""
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_usable(item) for item in value)
    return value


def with_lora(model: Any, lora: dict[str, Tensor]) -> Any:
    """Return a clone of MODEL with ``lora`` on it, through the host's own loader."""
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
