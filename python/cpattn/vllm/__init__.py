"""The attention back end ``CUSTOM`` of vLLM, for layers of keys and values in pages.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds it by the entry point ``cpattn`` of ``vllm.general_plugins``; ``register`` does the same by hand. With
decode context parallelism the ranks of a group share the tokens of every sequence. docs/SERVING_STACKS.md says which
versions it was written for, and what of them it takes.
"""


def register() -> None:
    """Makes this back end vLLM's ``AttentionBackendEnum.CUSTOM``. Imports none of vLLM's layers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "cpattn.vllm.backend.Backend")


__all__ = ["register"]
