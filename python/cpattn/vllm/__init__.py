"""The attention back ends of vLLM: ``CUSTOM`` for layers of keys and values in pages, ``CPATTN_MLA`` for those of latents.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds them by the entry point ``cpattn`` of ``vllm.general_plugins``; ``register`` does the same by hand. With
decode context parallelism the ranks of a group share the tokens of every sequence. docs/SERVING_STACKS.md says which
versions they were written for, and what of them they take.
"""


def register() -> None:
    """Makes these back ends vLLM's ``AttentionBackendEnum.CUSTOM`` and ``CPATTN_MLA``. Imports none of vLLM's layers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "cpattn.vllm.backend.Backend")
    if "CPATTN_MLA" not in AttentionBackendEnum.__members__:
        register_backend("CPATTN_MLA", "cpattn.vllm.latent_backend.LatentBackend")


__all__ = ["register"]
