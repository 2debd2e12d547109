"""VRAM Monitor."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.memory.summary import describe_memory
from . import _host


class VramMonitor(io.ComfyNode):
    """Shows memory now and over the last training run; hands its value through."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs; saved workflows depend on their names and order."""
        return _host.schema(
            node_id="LowVRAMMonitor",
            display_name="VRAM Monitor",
            description="Shows memory now and over the last training run. Put it after LoRA Train (low-VRAM).",
            is_output_node=True,
            inputs=[io.AnyType.Input("value", optional=True)],
            outputs=[
                io.AnyType.Output("value_out", display_name="value"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, value: Any = None) -> io.NodeOutput:
        """Return ``value`` untouched, and the report."""
        now = _host.ProcessHardware(_host.compute_device()).sample()
        report = describe_memory(_host.run_store().latest_memory(), now)
        return _host.reported(value, report=report, node_id=cls.hidden.unique_id)
