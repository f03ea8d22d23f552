"""The attention ``"cpattn"`` of Hugging Face's transformers, and its paged cache; inference only.

    cpattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="cpattn")
    cache = cpattn.transformers.PagedCache(model.config, num_blocks=1024)
    model.generate(**inputs, cache=cache)

Under torchrun, with torch.distributed initialised, ``PagedCache(..., group=group)`` shards the pages of every sequence
over the ranks of the group, each of which runs the same model on the same inputs.
"""

from .attention import register
from .cache import PagedCache

__all__ = ["PagedCache", "register"]
