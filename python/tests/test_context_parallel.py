"""PyTorch's recipe over several processes gives what one process computes."""

import pytest
import ranks

torch = pytest.importorskip("torch")
F = torch.nn.functional

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 32


class Model(torch.nn.Module):
    """One layer of attention with positions that are added, and no caches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.qkv = torch.nn.Linear(24, (HEADS + 2 * KV_HEADS) * DIM)

    def forward(self, x, positions, causal):
        rows = self.qkv(x * 3 + positions[..., None] * 0.01).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def inputs(length):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(BATCH, length, 24, generator=generator), torch.arange(length).float().expand(BATCH, -1).clone()


def recipe(rank, size, length):
    import torch.distributed as dist
    from cpattn.torch import context_parallel, context_parallel_unshard

    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    model, (x, positions) = Model(), inputs(length)
    whole = x.clone()
    with torch.no_grad():
        want = model(x, positions, True)
        full = model(x, positions, False)
        with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 1]):
            assert x.shape[1] < length
            shards = [model(x, positions, causal) for causal in (True, False)]
        torch.testing.assert_close(x, whole, rtol=0, atol=0)
        joined = context_parallel_unshard(mesh, shards, [2, 2], length)
        torch.testing.assert_close(joined, [want, full], rtol=0, atol=3e-5)
        torch.testing.assert_close(model(x, positions, True), want, rtol=0, atol=0)  # PyTorch's own again
    with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 1], no_restore_buffers={x}):
        with pytest.raises(NotImplementedError, match="has no gradients"):
            model(x, positions, True)
    assert x.shape[1] < length and positions.shape[1] == length
    whole, fixed = positions.clone(), torch.zeros(1, length, requires_grad=True)  # which is not cut
    with pytest.raises(RuntimeError, match="resize"):
        with context_parallel(mesh, buffers=[positions, fixed], buffer_seq_dims=[1, 1]):
            pytest.fail("entered")
    torch.testing.assert_close(positions, whole, rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.parametrize("length", [150, 20])
def test_recipe(length):
    ranks.run(recipe, 3, length)  # of 20 tokens the last rank has none
