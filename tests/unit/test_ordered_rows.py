"""Rows that packs take one after the other == verl's own selection of those rows."""

import os

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")

from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from prefixflow_verl.rollouts import OrderedRows

LENGTHS = (3, 1, 4, 1, 5)


@pytest.fixture
def rows() -> TensorDict:
    jagged = [torch.arange(length) + 10 * index for index, length in enumerate(LENGTHS)]
    pages = [row[:, None].expand(-1, 2).float() for row in jagged]
    return TensorDict(
        {
            "jagged": torch.nested.as_nested_tensor(jagged, layout=torch.jagged),
            "pages": tu.nested_tensor_from_tensor_list(pages, ragged_idx=1),
            "dense": torch.arange(10).view(5, 2),
            "uid": NonTensorStack(*(NonTensorData(f"row {index}") for index in range(5))),
            "temperature": NonTensorData(0.7),
        },
        batch_size=5,
    )


@pytest.mark.parametrize("packs", [[[3, 0], [4], [1, 2]], [[0, 1, 2, 3, 4]], [[2]]])
def test_a_pack_takes_its_rows(rows, packs) -> None:
    ordered = OrderedRows(rows, [index for pack in packs for index in pack])
    for pack in packs:
        ours, truth = ordered.take(pack), tu.index_select_tensor_dict(rows, pack)
        assert set(ours.keys()) == set(truth.keys())
        for key in ("jagged", "pages"):
            for a, b in zip(ours[key].unbind(), truth[key].unbind(), strict=True):
                assert torch.equal(a, b), key
        padded = (rows["jagged"].to_padded_tensor(-1) for rows in (ours, truth))
        assert torch.equal(*padded)
        assert torch.equal(ours["dense"], truth["dense"])
        assert ours["uid"] == truth["uid"]
        assert ours["temperature"] == truth["temperature"] == 0.7


def test_nothing_completes() -> None:
    OrderedRows(TensorDict({"dense": torch.zeros(2, 3)}, batch_size=2), [])
