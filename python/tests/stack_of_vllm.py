"""What tests of vLLM's back ends have in common: its configuration, on the host, and its groups of ranks."""

import contextlib
import os

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # a wheel for CUDA finds no platform on a machine without

from vllm.config import (CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig,  # noqa: E402
                         set_current_vllm_config)

BLOCK = 16
MODEL = os.environ["CPATTN_TEST_MODEL"]


def configure(dtype="float32", cache_dtype="auto", **parallel):
    model = ModelConfig(model=MODEL, dtype=dtype, max_model_len=256, skip_tokenizer_init=True)
    config = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype),
                        parallel_config=ParallelConfig(), device_config=DeviceConfig(device="cpu"))
    for name, value in parallel.items():  # what ranks of a launcher would have been told
        setattr(config.parallel_config, name, value)
    return config


@contextlib.contextmanager
def join(config, rank, size):
    """This process is a rank, and all of them share the tokens of sequences."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import (destroy_model_parallel, init_distributed_environment,
                                                 initialize_model_parallel)

    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, "env://", rank, "gloo")
        initialize_model_parallel(size, decode_context_model_parallel_size=size, backend="gloo")
    yield
    destroy_model_parallel()
    dist.destroy_process_group()


def tensors(dtype, *arrays):
    return [torch.from_numpy(x).to(dtype) for x in arrays]
