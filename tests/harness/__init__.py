"""Runs the pack in a real ComfyUI for the demo, the tests and the benchmarks."""
