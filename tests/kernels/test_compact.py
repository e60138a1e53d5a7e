"""compact_path: one path of every row is kept, in all tensors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

PATHS = [[0, 2, 3, 9, 15], [0], [0, 1, 2, 3], [0, 5]]
LENGTHS = [5, 0, 20, 8]


def arguments(device: torch.device, width: int = 16) -> tuple[torch.Tensor, ...]:
    path = torch.full((len(PATHS), width), -1)
    for row, nodes in enumerate(PATHS):
        path[row, : len(nodes)] = torch.tensor(nodes)
    kept = torch.tensor([len(nodes) for nodes in PATHS])
    return torch.tensor(LENGTHS).to(device), path.to(device), kept.to(device)


def expected(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.clone()
    for row, (length, nodes) in enumerate(zip(LENGTHS, PATHS, strict=True)):
        for i, node in enumerate(nodes):
            moved[row, length + i] = tensor[row, length + node]
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_paths(impl: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    """Head sizes, head counts and capacities differ; storage may be a slice of a larger one.

    The table stays valid while the tensors stay where they are.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 250, shape, generator=generator).to(dtype).to(device)

    tensors = [
        random(4, 40, 2, 16),
        random(4, 40, 2, 24),
        random(4, 64, 1, 8)[:, :40],
        random(4, 50, 144),
        random(4, 40, 3, 32)[:, :, :2],
    ]
    table = impl.PathTable(tensors)
    for _ in range(2):
        want = [expected(tensor) for tensor in tensors]
        assert not torch.equal(want[0], tensors[0])
        impl.compact_path(table, *arguments(device))
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


@pytest.mark.parametrize("width", [3, 5, 6], ids="W{}".format)
def test_odd_widths(impl: ModuleType, device: torch.device, width: int) -> None:
    """Tokens whose size is no multiple of 16 bytes, or of 4."""
    tensor = torch.arange(4 * 40 * width).view(4, 40, width).to(torch.int16).to(device)
    want = expected(tensor)
    impl.compact_path(impl.PathTable([tensor]), *arguments(device))
    assert torch.equal(tensor, want)


def test_other_device_types() -> None:
    """Tensors of two devices get a table each."""
    from lookahead_hf.kernels.data import PathTable

    table = PathTable([torch.zeros(1, 4, 2), torch.zeros(1, 4, 2, device="meta")])
    assert [part.tensors[0].device.type for part in table.by_device] == ["cpu", "meta"]
    assert PathTable([]).by_device == []
