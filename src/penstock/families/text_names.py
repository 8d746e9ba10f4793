"""Names of tensors in checkpoints that hold a text model among other parts, such as an encoder of images.

The text model's names there have a prefix, and what the other parts have is never read. Used by
`weights.checkpoint` for tensors, and by `families.wrappers` for names in a configuration. Torch-free.
"""

from __future__ import annotations

# (prefix of the text model's tensors, what stands in its place in a text model alone): older and newer forms.
_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))

_OTHER_PARTS = (
    "audio_tower",
    "embed_audio",
    "embed_vision",
    "multi_modal_projector",
    "patch_merger",
    "vision_encoder",
    "vision_language_adapter",
    "vision_model",
    "vision_tower",
    "visual",
)


def text_name(stored: str) -> str | None:
    """Return a tensor's name in the text model alone; None for a tensor of another part."""
    for prefix, alone in _PREFIXES:
        if stored.startswith(prefix):
            return alone + stored.removeprefix(prefix)
    first = stored.removeprefix("model.").partition(".")[0]
    return None if first in _OTHER_PARTS else stored
