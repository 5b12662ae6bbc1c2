"""Part of the provenance link: what the engine checks of verl's rows, and says it consumed."""

from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from prefixflow_verl.provenance import (
    RECORD_KEY,
    PolicyRecord,
    PolicySpan,
    ProvenanceError,
    digest_tokens,
)
from prefixflow_verl.rollouts import (
    STEP_KEY,
    check_provenance,
    consumed_rows,
    log_prob_step_key,
)

STEP = 4
RESPONSE = torch.tensor([5, 6, 7])


def row(session: int, *, mask: int = 1, has_record: bool = True, **fields: Any) -> dict[str, Any]:
    record = PolicyRecord(
        uid="u",
        session=session,
        output=0,
        digest=digest_tokens(RESPONSE.numpy()),
        spans=(PolicySpan(num_tokens=3, version_start=3, version_end=3),),
    )
    return {
        "uid": "u",
        "prompts": torch.tensor([1, 2]),
        "input_ids": torch.cat([torch.tensor([1, 2]), RESPONSE]),
        "responses": RESPONSE,
        "response_mask": torch.full((3,), mask),
        "extra_fields": {RECORD_KEY: record.to_wire()} if has_record else {},
    } | fields


def rows(*given: dict[str, Any]):
    data = list_of_dict_to_tensordict(list(given))
    for name in ("input_ids", "prompts", "responses", "response_mask"):
        data[name] = torch.nested.as_nested_tensor(list(data[name]), layout=torch.jagged)
    tu.assign_non_tensor(data, **{STEP_KEY: STEP})
    return data


def test_copies_that_pad_a_batch_are_not_consumed():
    """verl pads with copies of a row, record and all, whose response mask is zero."""
    records = check_provenance(rows(row(0), row(1), row(0, mask=0), row(0, mask=0)))
    assert consumed_rows(records, 0)["keys"] == ["u_0_0", "u_1_0"]


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("kind", ["old", "ref"])
def test_log_probs_of_another_step_are_refused_with_and_without_a_record(kind, has_record):
    stale = {log_prob_step_key(kind): torch.tensor(STEP - 1)}
    with pytest.raises(ProvenanceError, match=f"the {kind} log-probs of .* in step {STEP - 1}"):
        check_provenance(rows(row(0, has_record=has_record, **stale)))
    good = {log_prob_step_key(kind): torch.tensor(STEP)}
    check_provenance(rows(row(0, has_record=has_record, **good)))
