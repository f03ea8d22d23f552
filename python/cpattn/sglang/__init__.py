"""The attention back end ``cpattn`` of SGLang, for layers of keys and values in pages.

    python -m sglang.launch_server --model-path MODEL --attention-backend cpattn

SGLang finds it by the entry point ``cpattn`` of ``sglang.srt.plugins``; ``register`` does the same by hand.
docs/SERVING_STACKS.md says which version it was written for, and what of it it takes.
"""

from typing import Any


def register() -> None:
    """Makes ``cpattn`` a choice of ``--attention-backend``."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if "cpattn" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["cpattn"])
    register_attention_backend("cpattn")(_create)


def _create(runner: Any) -> Any:
    from .backend import Backend

    return Backend(runner)


__all__ = ["register"]
