"""What our machinery costs by itself, on a network with SDXL's layers that are 32 wide, so that sums cost little.

Every layer call of a training step is made as in the step: the first run of its block, the second, and backward. A bare
loop makes the same products and convolutions on tensors that are all there beforehand; what remains is overhead: ours
and that of torch's autograd. The latter is measured with an autograd function that does the same sums and nothing else.
Block recompute is measured around blocks that do nothing, the optimizer beside torch's fused kernel. Overhead does not
depend on the width, so it is that of SDXL at full size as well, per step, on a processor like this one.

The network computes in float32 and the adapters are bfloat16: as many casts as in training, where it is the other way
round, without the processor's slow start of bfloat16 products.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bench import _full_size

WIDTH, RANK, ALPHA = 32, 16, 8.0
CPU, DTYPE, ADAPTER_DTYPE = torch.device("cpu"), torch.float32, torch.bfloat16
TARGETS = "attention + feed-forward"

Run = Callable[[], Any]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="the fastest of so many counts")
    parser.add_argument(
        "--weights",
        choices=("resident", "streamed", "host"),
        default="resident",
        help="where they come from: our own copies, the ring (its copies count as overhead), or the host's cast",
    )
    parser.add_argument("--profile", action="store_true", help="print where Python spends a step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    torch.set_num_threads(1)
    pack = _full_size.enter_host()
    with narrow_sdxl(pack, options.weights) as subject:
        if options.profile:
            profile(subject)
            return 0
        result = measure(subject, options.rounds)
    result.update(full_size(pack, result))
    print(json.dumps(result) if options.json else "\n".join(f"{name:28} {value}" for name, value in result.items()))
    return 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One layer's call in a step.

    Attributes:
        leaf: its input.
        in_block: it is made twice in a step.
    """

    module: Any
    leaf: Tensor
    in_block: bool
    is_adapted: bool

    @property
    def has_backward(self) -> bool:
        """Whether anything in the call gets a gradient."""
        return self.is_adapted or self.leaf.requires_grad


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network in a state fit for training, and what a step calls in it."""

    core: Any
    network: nn.Module
    memory: Any
    layers: dict[str, nn.Module]
    adapters: Any
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]]
    optimizer: Any

    def begin(self) -> None:
        """Tell the source of weights that a pass begins, if it wants to know."""
        getattr(self.memory.source, "begin", lambda: None)()

    def forward(self) -> Tensor:
        """Return the network's output for a picture of 128 pixels a side."""
        generator = torch.Generator().manual_seed(1)
        x, context, vector = (
            torch.randn(shape, generator=generator).to(DTYPE) for shape in ((1, 4, 16, 16), (1, 8, WIDTH), (1, WIDTH))
        )
        return self.network(x, torch.tensor([500.0]), context=context, y=vector, transformer_options={})

    def blocks(self) -> dict[nn.Module, Any]:
        """Return every block with its stand-in."""
        return dict(self.core.memory.recompute.recomputed(self.network, self.memory, CPU, self.layers))

    def step(self) -> None:
        """Run one training step."""
        self.begin()
        self.forward().float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def narrow_sdxl(pack: Any, weights: str) -> Iterator[Subject]:
    """Hold a narrow SDXL network in a state fit for training, with its weights from where ``weights`` says."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from tests.inhost import tiny

    core = pack.lowvram_lora
    narrow = {"model_channels": WIDTH, "context_dim": WIDTH, "adm_in_channels": WIDTH, "num_head_channels": WIDTH}
    config = {**_full_size.FAMILIES["sdxl"].unet_config, **narrow}
    with torch.inference_mode():
        network = UNetModel(**config, dtype=DTYPE, device=CPU, operations=comfy.ops.manual_cast)
        tiny.fill(network, seed=0)
    frozen = core.memory.frozen
    layers = core.adapters.targets.select(network, TARGETS)
    adapters = core.adapters.attach.build(layers, core.config.LoraConfig(rank=RANK, alpha=ALPHA), 0, CPU, ADAPTER_DTYPE)
    memory = frozen.BlockMemory(source_of(pack, network, weights))
    forwards = {module: frozen.frozen_forward(module, memory) for _, module in frozen.matrices(network)}
    forwards.update(core.adapters.attach.adapted_forwards(layers, adapters, memory))
    with ExitStack() as undo:
        undo.enter_context(frozen.usable_parameters(network, DTYPE, CPU))
        undo.enter_context(frozen.frozen(forwards))
        optimizer = core.training.optim.PlainAdamW(adapters.parameters(), lr=1e-4, weight_decay=0.01)
        yield Subject(
            core=core,
            network=network,
            memory=memory,
            layers=layers,
            adapters=adapters,
            forwards=forwards,
            optimizer=optimizer,
        )


def source_of(pack: Any, network: nn.Module, weights: str) -> Any:
    """Return the source of the network's weights; the CPU stands for a device that holds none of them yet."""
    core, host = pack.lowvram_lora, pack.nodes._models.HostWeights()
    if weights == "host":
        return host

    stream, transfers = (import_module(f"{core.__name__}.memory.{name}") for name in ("stream", "transfers"))

    class Apart(transfers.DeviceTransfers):  # type: ignore[misc,name-defined]
        def holds(self, tensor: Tensor) -> bool:
            return False

    paths = [path for path, _ in core.memory.frozen.matrices(network)]
    settings = {"resident": {"resident": frozenset(paths)}, "streamed": {"ring_bytes": 4 << 20}}
    return stream.Streamed(host, Apart(CPU), network, core.memory.setting.Setting(**settings[weights]))


def measure(subject: Subject, rounds: int) -> dict[str, Any]:
    """Return times of a step and of its parts."""
    calls = recorded_calls(subject)
    adapted, others = ([call for call in calls if call.is_adapted == wanted] for wanted in (True, False))
    num_adapted, num_others = (count(part) for part in (adapted, others))
    adapted_s = fastest([as_trained(subject, adapted), bare(subject, adapted), minimal(subject, adapted)], rounds)
    others_s = fastest([as_trained(subject, others), bare(subject, others)], rounds)
    blocks_s = fastest(around_nothing(subject), rounds)
    optimizer_s = fastest(updates(subject), rounds)
    with subject.core.memory.frozen.frozen(subject.blocks()):
        (step_s,) = fastest([subject.step], rounds)
    num_blocks = len(subject.blocks())
    over = [part[0] - part[1] for part in (adapted_s, others_s, blocks_s, optimizer_s)]
    return {
        "adapted_calls_per_step": num_adapted,
        "us_per_adapted_call": round(over[0] / num_adapted * 1e6, 2),
        "of_which_autograd_us": round((adapted_s[2] - adapted_s[1]) / num_adapted * 1e6, 2),
        "bare_us_per_adapted_call": round(adapted_s[1] / num_adapted * 1e6, 2),
        "other_calls_per_step": num_others,
        "us_per_other_call": round(over[1] / num_others * 1e6, 2),
        "blocks": num_blocks,
        "us_per_block": round(over[2] / num_blocks * 1e6, 2),
        "optimizer_us": round(over[3] * 1e6, 2),
        "overhead_ms_per_step": round(sum(over) * 1e3, 2),
        "step_ms": round(step_s * 1e3, 2),
        "share": round(sum(over) / step_s, 3),
    }


def full_size(pack: Any, narrow: dict[str, Any]) -> dict[str, Any]:
    """Return what the overhead comes to on the network that the narrow one stands for."""
    core, network = pack.lowvram_lora, _full_size.model("sdxl").model.diffusion_model
    num_layers = len(core.adapters.targets.select(network, TARGETS))
    num_blocks = len(core.memory.recompute.find_blocks(network))
    if (3 * num_layers, num_blocks) != (narrow["adapted_calls_per_step"], narrow["blocks"]):
        raise SystemExit("The narrow network has other layers than SDXL.")
    return {"full_sdxl_calls_per_step": 3 * num_layers, "full_sdxl_ms_per_step": narrow["overhead_ms_per_step"]}


def fastest(runs: Sequence[Run], rounds: int) -> list[float]:
    """Return the least processor seconds of each run; they take turns, so that a drifting machine is fair to all."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 2):
        for run, seconds in zip(runs, times, strict=True):
            began = time.process_time()
            run()
            if number > 1:
                seconds.append(time.process_time() - began)
    return [min(seconds) for seconds in times]


def count(calls: Sequence[Call]) -> int:
    """Return how often layers work in a step: in the first run, the second, and backward."""
    return sum(1 + call.in_block + call.has_backward for call in calls)


def recorded_calls(subject: Subject) -> list[Call]:
    """Return the layer calls of a step, with inputs of their own."""
    calls: list[Call] = []
    blocks = subject.core.memory.recompute.find_blocks(subject.network)
    adapted = set(subject.layers.values())

    def record(path: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
        in_block = any(path.startswith(f"{block}.") for block in blocks)

        def forward(x: Tensor) -> Tensor:
            leaf = x.detach().clone().requires_grad_(x.requires_grad)
            calls.append(Call(module=module, leaf=leaf, in_block=in_block, is_adapted=module in adapted))
            return subject.forwards[module](x)

        return forward

    frozen = subject.core.memory.frozen
    with frozen.frozen({module: record(path, module) for path, module in frozen.matrices(subject.network)}):
        subject.forward()
    return calls


def as_trained(subject: Subject, calls: Sequence[Call]) -> Run:
    """Return a run of ``calls`` as a step makes them: those inside blocks twice, and all backward."""
    memory = subject.memory
    inside, outside = (
        [(subject.forwards[call.module], call.leaf) for call in calls if call.in_block == wanted]
        for wanted in (True, False)
    )
    gradients = {wanted: [torch.ones_like(f(x)) for f, x in part] for wanted, part in ((1, inside), (0, outside))}

    def run() -> None:
        forget_gradients(subject, calls)
        subject.begin()
        kept: list[Any] = []
        with torch.no_grad(), memory.recording(kept):
            for forward, leaf in inside:
                forward(leaf)
        with memory.replaying(kept):
            backward([forward(leaf) for forward, leaf in inside], gradients[1])
        backward([forward(leaf) for forward, leaf in outside], gradients[0])

    return run


def forget_gradients(subject: Subject, calls: Sequence[Call]) -> None:
    """Let no gradient be added to an earlier one."""
    for call in calls:
        call.leaf.grad = None
    subject.optimizer.zero_grad()


def backward(outs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run backward from those of ``outs`` that need it."""
    pairs = [(out, gradient) for out, gradient in zip(outs, gradients, strict=True) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])


def bare(subject: Subject, calls: Sequence[Call]) -> Run:
    """Return a loop over the sums of ``calls``, on tensors that are there beforehand."""
    ops: list[Callable[[], Any]] = []
    for call in calls:
        if hasattr(call.module, "in_features"):
            forward, gradient = linear_sums(subject, call)
        else:
            forward, gradient = conv_sums(call)
        # Convolutions inside blocks answer a second time from memory.
        is_twice = call.in_block and hasattr(call.module, "in_features")
        ops += forward * (1 + is_twice) + (gradient if call.has_backward else [])

    def run() -> None:
        with torch.no_grad():
            for op in ops:
                op()

    return run


def linear_sums(subject: Subject, call: Call) -> tuple[list[Run], list[Run]]:
    """Return the products of a linear layer's forward and backward pass."""
    weight, bias, rows = weight_of(call.module), bias_of(call.module), call.leaf.detach().flatten(0, -2)
    out, turned, grad_x = rows.new_empty(len(rows), len(weight)), weight.t(), torch.empty_like(rows)
    gradient = torch.ones_like(out)
    forward = [partial(torch.mm, rows, turned, out=out)]
    if bias is not None:
        forward = [partial(torch.addmm, bias, rows, turned, out=out)]
    to_input = [partial(torch.mm, gradient, weight, out=grad_x)] if call.leaf.requires_grad else []
    if not call.is_adapted:
        return forward, to_input
    down, up = small_matrices(subject, call)
    hidden, grad_hidden = (rows.new_empty(len(rows), RANK) for _ in range(2))
    scaled = {"alpha": ALPHA / RANK}
    forward = [
        partial(torch.mm, rows, down.t(), out=hidden),
        *forward,
        partial(torch.addmm, out, hidden, up.t(), out=out, **scaled),
    ]
    backward = [
        partial(torch.addmm, rows.new_empty(()), gradient, up, beta=0, out=grad_hidden, **scaled),
        partial(torch.addmm, rows.new_empty(()), hidden.t(), gradient, beta=0, out=torch.empty_like(up.t()), **scaled),
        partial(torch.mm, grad_hidden.t(), rows, out=torch.empty_like(down)),
        *to_input,
    ]
    if to_input:
        backward.append(partial(torch.addmm, grad_x, grad_hidden, down, out=grad_x))
    return forward, backward


def conv_sums(call: Call) -> tuple[list[Run], list[Run]]:
    """Return the forward and backward convolution of a frozen layer, as the pack computes them."""
    from lowvram_lora.memory.convolution import convolve, input_gradient

    weight, bias, x = weight_of(call.module), bias_of(call.module), call.leaf.detach()
    gradient = torch.ones_like(convolve(x, weight, bias, call.module))
    return (
        [partial(convolve, x, weight, bias, call.module)],
        [partial(input_gradient, gradient, x.shape, weight, call.module)],
    )


def weight_of(module: Any) -> Tensor:
    """Return the layer's weight in a form that autograd takes."""
    return module.weight.detach().clone()  # type: ignore[no-any-return]


def bias_of(module: Any) -> Tensor | None:
    """Return the layer's bias in a form that autograd takes, or None."""
    return None if module.bias is None else module.bias.detach().clone()


def small_matrices(subject: Subject, call: Call) -> tuple[Tensor, Tensor]:
    """Return copies of an adapter's two matrices in the network's type."""
    path = next(path for path, module in subject.layers.items() if module is call.module)
    down, up = subject.adapters.state()[path]
    return down.to(DTYPE), up.to(DTYPE)


class _Minimal(torch.autograd.Function):
    """An adapted layer's sums as an autograd function, with all that they need at hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.flatten(0, -2)
        hidden = F.linear(rows, down)
        out = F.linear(rows, weight, bias)
        torch.addmm(out, hidden, up.t(), alpha=ALPHA / RANK, out=out)
        ctx.save_for_backward(x, hidden, down, up, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, hidden, down, up, weight = ctx.saved_tensors
        zero = grad.new_empty(())
        grad_hidden = torch.addmm(zero, grad, up, beta=0, alpha=ALPHA / RANK)
        grad_up = torch.addmm(zero, hidden.t(), grad, beta=0, alpha=ALPHA / RANK).t()
        grad_down = torch.mm(grad_hidden.t(), x.flatten(0, -2))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad, weight).addmm_(grad_hidden, down).view(x.shape)
        return grad_x, grad_down, grad_up, None, None


def minimal(subject: Subject, calls: Sequence[Call]) -> Run:
    """Return a run of adapted ``calls`` by the least that autograd can do them with."""
    arguments = [
        (
            call.leaf,
            *(m.requires_grad_() for m in small_matrices(subject, call)),
            weight_of(call.module),
            bias_of(call.module),
        )
        for call in calls
    ]
    gradients = [torch.ones_like(_Minimal.apply(*each)) for each in arguments]

    def run() -> None:
        for leaf, down, up, *_ in arguments:
            leaf.grad = down.grad = up.grad = None
        with torch.no_grad():
            for each in arguments:
                _Minimal.forward(_Forgetful, *each)
        backward([_Minimal.apply(*each) for each in arguments], gradients)

    return run


class _Forgetful:
    """A context that saves nothing."""

    @staticmethod
    def save_for_backward(*_: Any) -> None:
        """Do nothing."""


def around_nothing(subject: Subject) -> list[Run]:
    """Return a run of every block's stand-in around a block that copies its input, and of the copies alone."""
    frozen = subject.core.memory.frozen
    arguments: dict[nn.Module, tuple[Any, Any]] = {}

    def record(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments[block] = tuple(map(as_leaf, args)), {name: as_leaf(value) for name, value in kwargs.items()}
            return type(block).forward(block, *args, **kwargs)

        return forward

    with frozen.frozen({block: record(block) for block in subject.blocks()}):
        subject.forward()

    def copy(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x * 1.0

    with frozen.frozen(dict.fromkeys(arguments, copy)):
        stand_ins = subject.blocks()
    calls = [(stand_ins[block], args, kwargs) for block, (args, kwargs) in arguments.items()]
    gradients = [torch.ones_like(args[0]) for _, args, _ in calls]

    def ours() -> None:
        backward([block(*args, **kwargs) for block, args, kwargs in calls], gradients)

    def copies() -> None:
        with torch.no_grad():
            for _, args, _ in calls:
                copy(args[0])
        backward([copy(args[0]) for _, args, _ in calls], gradients)

    return [ours, copies]


def as_leaf(value: Any) -> Any:
    """Return a tensor without its history, and anything else as it is."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def updates(subject: Subject) -> list[Run]:
    """Return a run of the optimizer's step, and of torch's kernel alone."""
    parameters, optimizer = subject.adapters.parameters(), subject.optimizer
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    states = [optimizer.state[parameter] for parameter in parameters]
    lists = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
    (group,) = optimizer.param_groups
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options.update(zip(("beta1", "beta2"), group["betas"], strict=True))

    def ours() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def kernel() -> None:
        with torch.no_grad():
            torch._foreach_add_([state["step"] for state in states], 1)
            torch._fused_adamw_(parameters, gradients, *lists, [], [state["step"] for state in states], **options)

    return [ours, kernel]


def profile(subject: Subject) -> None:
    """Print the functions that a step spends its time in."""
    with subject.core.memory.frozen.frozen(subject.blocks()):
        subject.step()
        profiler = cProfile.Profile()
        with profiler:
            for _ in range(5):
                subject.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
