"""The attention back ends of vLLM: ``CUSTOM`` over pages of keys and values, ``CPATTN_MLA`` over pages of latents.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds them by the entry point ``cpattn`` of ``vllm.general_plugins``; ``register`` does the same by hand. With
decode context parallelism the ranks of a group share the tokens of every sequence. docs/SERVING_STACKS.md says which
versions they were written for, and what of them they take.
"""

from typing import Any


def register() -> None:
    """Makes them vLLM's ``AttentionBackendEnum.CUSTOM`` and ``CPATTN_MLA``. Imports none of vLLM's layers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "cpattn.vllm.backend.Backend")
    latent_member()


def latent_member() -> Any:
    """``AttentionBackendEnum.CPATTN_MLA``, which is made where it is not there: in a process that vLLM has spawned a
    configuration comes with it before plugins are loaded."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if "CPATTN_MLA" not in AttentionBackendEnum.__members__:
        register_backend("CPATTN_MLA", "cpattn.vllm.latent_backend.LatentBackend")
        member: Any = AttentionBackendEnum["CPATTN_MLA"]
        member.__reduce_ex__ = lambda protocol: (latent_member, ())
    return AttentionBackendEnum["CPATTN_MLA"]


__all__ = ["latent_member", "register"]
