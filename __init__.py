"""ComfyUI entry point of the Low-VRAM LoRA pack."""

WEB_DIRECTORY = "./web"

# pytest imports this file without a package; the host always has one.
if __package__:
    from .nodes import comfy_entrypoint

    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
