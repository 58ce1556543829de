"""One process of a run with a moving anchor; see `test_distributed`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.reference.policies import kls, make_trainer, train, trained_policy, weights  # noqa: E402
from trl_grpo_ext.reference import REF_ADAPTER, MovingAnchor, base_digest  # noqa: E402

if __name__ == "__main__":
    base, folder = sys.argv[1:]
    policy = trained_policy(base, name="policy")
    before = base_digest(policy)
    trainer = train(
        make_trainer(policy, base, folder, reference=MovingAnchor(every=2, alpha=0.6), max_steps=3, beta=0.1)
    )
    result = {
        "anchor": {key: value.tolist() for key, value in weights(policy, REF_ADAPTER).items()},
        "policy": {key: value.tolist() for key, value in weights(policy, "policy").items()},
        "base": base_digest(policy) == before,
        "errors": [e["reference/move_error"] for e in trainer.state.log_history if "reference/move_error" in e],
        "kl": kls(trainer),
    }
    (Path(folder) / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
